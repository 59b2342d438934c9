from accounts import TASKS, balance, question, right

from actors.environments.base import Environment, Episode, Reply, Step, tool
from pipeline.schema.trajectory import Message, Task


class Bank(Environment):
    loop = "tool_agent"

    def start(self, task: Task) -> Episode:
        return Payment(TASKS[task.seed % len(TASKS)])


class Payment(Episode):
    def __init__(self, row: dict) -> None:
        self.row = row
        self.messages = (Message("user", question(row)),)

    @tool
    def balance(self, name: str) -> int:
        """Look up the balance of an account."""
        return balance(name)

    def step(self, reply: Reply) -> Step:
        return Step(reward=right(reply, self.row["answer"]), done=True)
