"""The examples of Pydantic AI: hello world, and a function as a tool."""

from pydantic_ai import Agent

agent = Agent("openai:gpt-5.5", instructions="Be concise, reply with one sentence.")

result = agent.run_sync('Where does "hello world" come from?')
print(result.output)

agent = Agent("openai-chat:gpt-5.5", instructions="Use the tool to answer.")


@agent.tool_plain
def get_weather(city: str) -> str:
    """Get weather for a given city."""
    return f"It's always sunny in {city}!"


result = agent.run_sync("What's the weather in Tokyo?")
print(result.output)
