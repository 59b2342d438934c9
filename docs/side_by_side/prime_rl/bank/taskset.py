import verifiers.v1 as vf

from bank.accounts import TASKS, question, right
from bank.tools import BankTools


class BankData(vf.TaskData):
    answer: str


class BankTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class BankTask(vf.Task[BankData, vf.State, BankTaskConfig]):
    @classmethod
    def toolsets(cls, config: BankTaskConfig) -> list[vf.Toolset]:
        return [BankTools(config.tools)]

    @vf.reward
    async def can_pay(self, trace: vf.Trace) -> float:
        return right(trace.last_reply, self.data.answer)


class BankConfig(vf.TasksetConfig):
    task: BankTaskConfig = BankTaskConfig()


class BankTaskset(vf.Taskset[BankTask, BankConfig]):
    def load(self) -> list[BankTask]:
        return [
            BankTask(BankData(idx=i, prompt=question(t), answer=t["answer"]), self.config.task)
            for i, t in enumerate(TASKS)
        ]
