"""The first examples of OpenAI's Python package: a completion, and a streamed one."""

from openai import OpenAI

client = OpenAI()

completion = client.chat.completions.create(
    model="gpt-5.5",
    messages=[
        {"role": "developer", "content": "Talk like a pirate."},
        {"role": "user", "content": "How do I check if a Python object is an instance of a class?"},
    ],
)
print(completion.choices[0].message.content)

stream = client.chat.completions.create(
    model="gpt-5.5", messages=[{"role": "user", "content": "Say this is a test"}], stream=True
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="")
