"""The engine: slots, buckets and steps. It knows tokens and tensors, never HTTP.

    engine = Engine(model, tokenizer=None, max_queued_tokens=None, ...)   # decoders: metadata task "generate"
    engine.start()                      # runs every graph once, measures it, then accepts requests
    ticket = engine.submit(prompt_ids, SamplingParams(...), on_event, timeout=None, request_id=None)
    ticket.cancel()                     # from any thread; the slot is free when the step in flight ends
    engine.stats(); engine.health(); engine.drain(timeout); engine.close(); engine.wait_failed(timeout)

    oneshot = OneShotEngine(model, max_delay_ms=2.0, max_queued_tokens=None)   # everything else
    future = oneshot.submit({"input_ids": tensor, ...}, timeout=None)           # Future[dict[str, Tensor]]

``submit`` raises RequestError, PromptTooLongError, QueueFullError or EngineUnavailableError at once; later failures
arrive as an ErrorEvent, or as the future's exception. ``on_event`` is called from the engine's thread: it must not
block (an asyncio caller hands over with ``loop.call_soon_threadsafe``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_server.engine.engine_core import EngineHealth, EngineStats
    from nxd_server.engine.generation_engine import Engine
    from nxd_server.engine.oneshot_engine import OneShotEngine
    from nxd_server.engine.request import ErrorEvent, Event, FinishEvent, Ticket, Timings, TokenEvent, Usage
    from nxd_server.engine.sampling_params import SamplingParams
    from nxd_server.engine.text_encoder import TextEncoder

__all__ = [
    "Engine", "EngineHealth", "EngineStats", "ErrorEvent", "Event", "FinishEvent", "OneShotEngine", "SamplingParams",
    "TextEncoder", "Ticket", "Timings", "TokenEvent", "Usage",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".engine_core": "EngineHealth EngineStats",
        ".generation_engine": "Engine",
        ".oneshot_engine": "OneShotEngine",
        ".request": "ErrorEvent Event FinishEvent Ticket Timings TokenEvent Usage",
        ".sampling_params": "SamplingParams",
        ".text_encoder": "TextEncoder",
    },
)
