"""STAPO inside TRL: a tiny model learns sums on a CPU in about a minute. Needs the extra `trl`.

The three lines that differ from a script with TRL's own GRPOTrainer are marked.
"""

import random

from datasets import Dataset

from trimtab.engines.trl import TrimtabConfig, TrimtabTrainer  # instead of trl's GRPOConfig and GRPOTrainer
from trimtab.trainer.model.loading import demo_model, demo_tokenizer


def close(completions: list[str], answer: list[int], **_: object) -> list[float]:
    """Reward the right number with 1, others less the further they are off, and text that is no number with 0."""
    return [1 / (1 + abs(int(c) - a)) if c.isdecimal() else 0.0 for c, a in zip(completions, answer, strict=True)]


rng = random.Random(0)
pairs = [(rng.randrange(5), rng.randrange(5)) for _ in range(1024)]
dataset = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [a + b for a, b in pairs]})

args = TrimtabConfig(  # this
    objective="stapo(tau_p=0.2)",  # and this: a vocabulary of 17 has fewer rare tokens than one of 150 thousand
    output_dir="runs/trl-arithmetic",
    record="runs/trl-arithmetic",  # then: trimtab replay runs/trl-arithmetic --objective gspo
    per_device_train_batch_size=128,
    num_generations=8,
    max_completion_length=3,
    learning_rate=1e-3,
    max_steps=60,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
)
trainer = TrimtabTrainer(  # and this
    model=demo_model(seed=0),
    reward_funcs=close,
    args=args,
    train_dataset=dataset,
    processing_class=demo_tokenizer(),
)
trainer.train()
rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
print(f"mean reward {rewards[0]:.2f} at the start, {rewards[-1]:.2f} at the end")
