"""Errors of a prompt or text that is too long for the model, and their words (400, ``context_length_exceeded``)."""

from __future__ import annotations

from nxd_server.errors.requests import RequestError


class PromptTooLongError(RequestError):
    """A prompt over the model's maximum length (400, ``context_length_exceeded``)."""

    def __init__(self, prompt_tokens: int, max_len: int, field: str = "prompt", *, completes: bool = True):
        what, together, fix = "text", "", "--prompt-buckets, where it takes more, or ask for truncate_prompt_tokens"
        if completes:
            what, together, fix = "prompt", ", prompt and completion together", "--max-len"
        super().__init__(
            field,
            f"the {what} has {prompt_tokens} tokens; this model's maximum context length is {max_len} tokens"
            f"{together}. Shorten the {what}, or trace the model again with a larger {fix}",
        )
        self.prompt_tokens = prompt_tokens
        self.max_len = max_len


class MaxTokensError(RequestError):
    """More tokens were requested than fit after the prompt (400, ``context_length_exceeded``)."""

    def __init__(self, asked: int, prompt_tokens: int, max_len: int, field: str = "max_tokens"):
        self.room = max(1, max_len - prompt_tokens)
        super().__init__(
            field,
            f"{asked} tokens do not fit: this model's maximum context length is {max_len} tokens, and the prompt has "
            f"{prompt_tokens}, which leaves {self.room}. Ask for fewer, or shorten the prompt",
        )


class TextTooLongError(RequestError):
    """A text so long that it must exceed the model's maximum length, however it is tokenized (400,
    ``context_length_exceeded``)."""
