from accounts import TASKS, balance, question, right
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def reward(completions, answer, **kwargs):
    return [right(messages[-1]["content"], a) for messages, a in zip(completions, answer)]


rows = [{"prompt": [{"role": "user", "content": question(t)}], "answer": t["answer"]} for t in TASKS]
args = GRPOConfig(
    output_dir="bank",
    max_steps=100,
    learning_rate=1e-6,
    num_generations=8,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=8,
    max_completion_length=512,
    max_tool_calling_iterations=3,
    use_vllm=True,
    vllm_mode="colocate",
)
GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=reward,
    args=args,
    train_dataset=Dataset.from_list(rows),
    tools=[balance],
).train()
