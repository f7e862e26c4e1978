"""An agent with 5 turns of 32 tokens, beside single turns of as many: timing/sampler_generate_s of both in rows.jsonl.

    run="python tools/benchmarks/tandem_run.py --cell 1m-8x8-p64-c160 --steps 6 --out rows.jsonl"
    $run --row single -- trainer.max_staleness=0
    $run --row agents -- trainer.max_staleness=0 rollout.agent=tools/benchmarks/agent.py:solve rollout.max_turns=5 \
        sampler.max_completion_length=400 vllm.max_model_len=512
"""

from openai import AsyncOpenAI

client = AsyncOpenAI()


async def solve(question: str) -> None:
    messages = [{"role": "user", "content": question}]
    for _ in range(5):
        response = await client.chat.completions.create(model="any", messages=messages, max_tokens=32)  # type: ignore
        messages += [response.choices[0].message, {"role": "user", "content": "7"}]  # type: ignore
