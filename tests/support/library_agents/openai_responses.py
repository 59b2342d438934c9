"""The first examples of OpenAI's Python package: a response, a streamed one, and one that continues."""

from openai import OpenAI

client = OpenAI()

response = client.responses.create(
    model="gpt-5.5",
    instructions="You are a coding assistant that talks like a pirate.",
    input="How do I check if a Python object is an instance of a class?",
)
print(response.output_text)

second = client.responses.create(
    model="gpt-5.5",
    instructions="You are a coding assistant that talks like a pirate.",
    previous_response_id=response.id,
    input=[{"role": "user", "content": "explain why"}],
)
print(second.output_text)

stream = client.responses.create(
    model="gpt-5.5", input="Write a one-sentence bedtime story about a unicorn.", stream=True
)
for event in stream:
    print(event)
