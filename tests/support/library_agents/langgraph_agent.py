"""The first example of LangGraph: a prebuilt agent with a tool."""

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def get_weather(city: str) -> str:
    """Get weather for a given city."""
    return f"It's always sunny in {city}!"


agent = create_react_agent(
    model=ChatOpenAI(model="gpt-5.5"),
    tools=[get_weather],
    prompt="You are a helpful assistant",
)

# Run the agent
state = agent.invoke({"messages": [{"role": "user", "content": "what is the weather in sf"}]})
print(state["messages"][-1].content)
