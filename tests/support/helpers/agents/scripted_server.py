"""A server that speaks OpenAI's Chat Completions and answers by a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Message = dict[str, Any]


@dataclass
class Refusal:
    """What a script returns instead of a message: an error in OpenAI's form."""

    status: int
    code: str
    message: str = "no"


Script = Callable[[list[Message], dict[str, Any]], Message | str | Refusal]


@dataclass
class ScriptedServer:
    """The address of the server, and the bodies and API keys of what it was asked."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


def tool_call(name: str, **arguments: Any) -> Message:
    """Return an assistant message with one call of a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
    }


@contextmanager
def scripted(script: Script) -> Iterator[ScriptedServer]:
    """Run a server whose answers come from a function of the messages and the whole body."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.bodies.append(body)
            server.keys.append(self.headers["authorization"].removeprefix("Bearer "))
            answer = script(body["messages"], body)
            if isinstance(answer, Refusal):
                error = {"message": answer.message, "type": "invalid_request_error", "code": answer.code}
                self.reply(answer.status, {"error": error})
            else:
                self.reply(200, completion(answer))

        def reply(self, status: int, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads = True
        server = ScriptedServer(f"http://127.0.0.1:{listener.server_port}/v1")
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()


def completion(answer: Message | str) -> dict[str, Any]:
    """Return the body of a completion with one message."""
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    choice = {"index": 0, "finish_reason": reason, "message": message, "logprobs": None}
    given = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy"}
    return {**given, "choices": [choice], "usage": usage}
