"""A small server of OpenAI's chat completions that judges: completions are scored by their length."""

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Serves within its `with`. trouble(n): what becomes of request n, "", "fail", "hang", an answer, or its parts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.trouble: Any = lambda n: ""
        self.requests, self.answered, self.over = list[Any](), list[Any](), threading.Event()
        self.numbers = itertools.count(1)

    def __enter__(self) -> "Server":
        threading.Thread(target=self.serve_forever).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(asked)
        trouble = self.server.trouble(next(self.server.numbers))
        if trouble == "hang":
            self.server.over.wait(60)
            return
        completions = json.loads(asked["messages"][1]["content"])["completions"]
        text = trouble if len(trouble) > 4 else json.dumps({"scores": [len(text) / 10 for text in completions]})
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        reply["choices"] = [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}]
        reply["usage"] = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        reply |= trouble if isinstance(trouble, dict) else {}
        body = json.dumps({} if trouble == "fail" else reply).encode()
        self.send_response(500 if trouble == "fail" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.answered += [asked] * (trouble != "fail")

    def log_message(self, *_: Any) -> None:
        pass
