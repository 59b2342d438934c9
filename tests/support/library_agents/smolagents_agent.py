"""The first example of smolagents, with the model of a server that speaks OpenAI's form."""

import os

from smolagents import CodeAgent, OpenAIModel

model = OpenAIModel(
    model_id="gpt-5.5",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = CodeAgent(tools=[], model=model)

result = agent.run("Calculate the sum of numbers from 1 to 10")
print(result)
