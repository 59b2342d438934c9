"""A coding agent of one page: the policy writes shell commands, the agent runs them and shows what they print. It needs
no package. The run takes solution.py from the sandbox when the agent has ended."""

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

TURNS = 8
SYSTEM = """You repair code with shell commands. Reply with one command in a block:
```sh
cat solution.py
```
You see what it prints. When solution.py is right, reply with DONE."""


def chat(messages: list[dict[str, str]]) -> str:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def run(command: str) -> str:
    try:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace", timeout=20)
    except subprocess.TimeoutExpired:
        return "(no end after 20 seconds)"
    return (done.stdout + done.stderr)[-2000:] or f"(exit code {done.returncode})"


messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": Path("TASK.md").read_text()}]
for _ in range(TURNS):
    try:
        reply = chat(messages)
    except urllib.error.HTTPError as error:
        if error.code == 400:  # a limit of the episode: what stands in solution.py counts
            break
        raise
    block = re.search(r"```(?:sh|bash|shell)?\n(.*?)```", reply, re.DOTALL)
    if "DONE" in reply and block is None:
        break
    answer = run(block.group(1)) if block else "Reply with one command in a block, or with DONE."
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]
