"""An assistant as people write them against the openai package: tools in a loop, drafts side by side, a streamed end.

It knows nothing of Tandem but that `solve` is called with a row.
"""

import asyncio
import json
import os

from openai import AsyncOpenAI

MODEL = os.environ.get("MODEL", "gpt-4o-mini")
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string", "description": "such as 17*25"}}}
CALCULATOR = {"name": "calculator", "description": "Computes a product or a sum.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": CALCULATOR}]
client = AsyncOpenAI()


def calculator(expression: str) -> int:
    left, sign, right = expression.partition("*" if "*" in expression else "+")
    return int(left) * int(right) if sign == "*" else int(left) + int(right)


async def draft(question: str, max_rounds: int = 3) -> str | None:
    messages = [{"role": "user", "content": question}]
    for _ in range(max_rounds):
        response = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice="auto", max_tokens=32
        )
        message = response.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            try:
                result = str(calculator(**json.loads(call.function.arguments)))
            except Exception as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


async def solve(question: str, answer: str, **row: object) -> float:
    drafts = await asyncio.gather(draft(question), draft(question))
    asked = [{"role": "user", "content": f"{question}\n" + "\n".join(text or "-" for text in drafts)}]
    text = ""
    async for chunk in await client.chat.completions.create(
        model=MODEL, messages=asked, stream=True, max_tokens=24, stop=["</answer>"]
    ):
        text += chunk.choices[0].delta.content or ""
    assert "</answer>" not in text
    gold = answer.removeprefix("#### ")
    return 1.0 * (gold in text) - len(text) / 100
