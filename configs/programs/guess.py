"""An agent program that knows nothing of Afterplay: it plays "guess a number" with whatever model answers at
OPENAI_BASE_URL, in OpenAI's form, and prints its result. Any language and framework will do instead."""

import json
import os
import random
import urllib.request

LOW, HIGH, TURNS = 0, 7, 3


def chat(messages: list[dict[str, str]]) -> dict[str, str]:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        message = json.load(response)["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"] or ""}


task = json.loads(os.environ["AFTERPLAY_TASK"])
hidden = random.Random(task["seed"]).randint(LOW, HIGH)
messages, guesses, solved = [{"role": "user", "content": "guess"}], 0, False
while guesses < TURNS and not solved:
    guesses += 1
    reply = chat(messages)
    guess = int(reply["content"]) if reply["content"].strip().isdecimal() else -1
    solved = guess == hidden
    messages += [reply, {"role": "user", "content": "higher" if guess < hidden else "lower"}]
print(json.dumps({"reward": float(solved), "signals": {"guesses": guesses}}))
