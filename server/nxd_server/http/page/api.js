// Requests to the server that the page came from. Their addresses are relative, so that a proxy's prefix stays.

/** The API key, which the browser forgets with the tab. */
export const key = {
  get: () => sessionStorage.getItem("nxd_infer.key") ?? "",
  set: (text) => sessionStorage.setItem("nxd_infer.key", text),
};

/** What the server refused; `status` is 0 if it could not be asked. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function lost(error) {
  throw error.name === "AbortError" ? error : new ApiError(0, "the server cannot be reached");
}

/** Returns a good response. Throws ApiError for another or none, AbortError once `signal` says so. */
export async function send(path, body, signal) {
  const headers = { "content-type": "application/json" };
  // A header holds bytes: those of UTF-8, one character each.
  if (key.get()) headers.authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key.get()))}`;
  const how = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(path, { ...how, headers, signal, cache: "no-store" }).catch(lost);
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw new ApiError(response.status, error?.message ?? `the server answered ${response.status}`);
}

export const ask = async (path, body) => (await send(path, body)).json();

/** Yields the events of a streamed answer. Throws ApiError if it ends before it is complete. */
export async function* stream(path, body, signal) {
  const response = await send(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read().catch(lost);
    if (done) throw new ApiError(0, "the server left in the middle of the answer");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment, which keeps the connection open
      if (block === "data: [DONE]") return;
      const event = JSON.parse(block.slice(6));
      if (event.error) throw new ApiError(503, event.error.message);
      yield event;
    }
  }
}
