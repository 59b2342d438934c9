import asyncio
import json
import random

import art
from accounts import TASKS, balance, question, right
from art.local import LocalBackend

PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "balance",
            "description": "Look up the balance of an account.",
            "parameters": PARAMETERS,
        },
    }
]


async def rollout(model, task):
    client = model.openai_client()
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": question(task)}], tools=TOOLS)
    for _ in range(4):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), tools=TOOLS, max_tokens=128
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        for call in choice.message.tool_calls or ():
            result = str(balance(**json.loads(call.function.arguments)))
            answer = {"role": "tool", "tool_call_id": call.id, "content": result}
            trajectory.messages_and_choices.append(answer)
        if not choice.message.tool_calls:
            break
    trajectory.reward = right(choice.message.content, task["answer"])
    return trajectory


async def main():
    model = art.TrainableModel(name="bank", project="bank", base_model="Qwen/Qwen2.5-0.5B-Instruct")
    backend = LocalBackend()
    await model.register(backend)
    for _ in range(await model.get_step(), 100):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, task) for _ in range(8)) for task in random.sample(TASKS, 8)
        )
        result = await backend.train(model, groups, learning_rate=1e-6)
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")


asyncio.run(main())
