// The answer to a question, event by event. EventSource cannot send a question, so the stream is read with fetch.
import { EventSourceParserStream } from "eventsource-parser/stream";
import { ApiError, readDetail } from "../api/errors";
import type { Model } from "../api/client";

export type AskEvent = Model<"AskEvent">;
export type AskRequest = Model<"AskRequest">;

/** Reads the events of a stream of bytes until it ends; one whose data is no JSON is an error. */
export async function* readEvents(body: ReadableStream<BufferSource>): AsyncGenerator<AskEvent> {
  const reader = body.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield JSON.parse(value.data) as AskEvent;
    }
  } finally {
    // Whoever stops reading ends the request, too: the policy need not go on writing.
    await reader.cancel().catch(() => undefined);
  }
}

/** Asks the policy of a run. The events end with one of kind "end" or "error"; a stream that breaks off throws. */
export async function* ask(run: string, request: AskRequest, signal: AbortSignal): AsyncGenerator<AskEvent> {
  const response = await fetch(`/api/runs/${encodeURIComponent(run)}/ask`, {
    method: "POST",
    headers: { "content-type": "application/json", accept: "text/event-stream" },
    body: JSON.stringify(request),
    signal,
  });
  if (!response.ok) throw new ApiError(response.status, readDetail(await response.text(), response.status));
  if (response.body === null) throw new Error("the answer has no stream");
  let isComplete = false;
  for await (const event of readEvents(response.body)) {
    isComplete ||= event.kind === "end" || event.kind === "error";
    yield event;
  }
  if (!isComplete) throw new Error("The connection broke before the answer was complete: ask again.");
}
