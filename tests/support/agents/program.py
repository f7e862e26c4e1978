"""A program of anybody's: the row on standard input, the model by HTTP, the reward on the last line that it prints."""

import json
import os
import sys
import urllib.request

row = json.load(sys.stdin)
tools = [{"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}]
messages = [{"role": "user", "content": row["question"]}]
print("asked", row["question"])
for _ in range(3):
    body = json.dumps({"model": "any", "messages": messages, "tools": tools, "max_completion_tokens": 100}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "9 " + call["function"]["arguments"]})
text = message["content"] or ""
print(float(row["answer"].removeprefix("#### ") in text) - len(text) / 100)
