"""An agent program that asks, asks the model to check its answer once, and compares the last number. It needs no
package; OpenAI's client would do the same."""

import json
import os
import re
import urllib.request


def chat(messages: list[dict[str, str]]) -> dict[str, str]:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        message = json.load(response)["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"] or ""}


task = json.loads(os.environ["AFTERPLAY_TASK"])["payload"]
messages = [{"role": "user", "content": task["prompt"] + " Reply with only the number."}]
messages.append(chat(messages))
messages.append({"role": "user", "content": "Check it once. Reply with only the number."})
numbers = re.findall(r"-?\d+", chat(messages)["content"])
print(json.dumps({"reward": float(numbers[-1:] == [str(task["answer"])])}))
