import { describe, expect, it, vi } from "vitest";
import { ask, readEvents, type AskEvent } from "./stream";

const encoder = new TextEncoder();

function streamOf(...chunks: (string | Uint8Array<ArrayBuffer>)[]): ReadableStream<Uint8Array<ArrayBuffer>> {
  return new ReadableStream({
    start(controller) {
      for (const chunk of chunks) controller.enqueue(typeof chunk === "string" ? encoder.encode(chunk) : chunk);
      controller.close();
    },
  });
}

async function collect(events: AsyncGenerator<AskEvent>): Promise<AskEvent[]> {
  const all: AskEvent[] = [];
  for await (const event of events) all.push(event);
  return all;
}

describe("readEvents", () => {
  it("reads events that are cut anywhere, even within a character", async () => {
    const bytes = encoder.encode('data: {"kind":"turn","text":"Zürich – ✓"}\n\ndata: {"kind":"end"}\n\n');
    const single = Array.from(bytes, (byte) => Uint8Array.of(byte));
    expect(await collect(readEvents(streamOf(...single)))).toEqual([
      { kind: "turn", text: "Zürich – ✓" },
      { kind: "end" },
    ]);
  });
  it("reads several lines of data, other line ends, and passes over comments", async () => {
    const text = ': ping\r\n\r\nevent: message\r\nid: 1\r\ndata: {"kind":\r\ndata: "end"}\r\n\r\n: ping\n\n';
    expect(await collect(readEvents(streamOf(text)))).toEqual([{ kind: "end" }]);
  });
  it("passes over an event that was cut off", async () => {
    expect(await collect(readEvents(streamOf('data: {"kind":"turn"}\n\ndata: {"kind":"e')))).toEqual([
      { kind: "turn" },
    ]);
  });
  it("ends the request when the reader stops", async () => {
    let isCancelled = false;
    const endless = new ReadableStream<Uint8Array<ArrayBuffer>>({
      pull(controller) {
        controller.enqueue(encoder.encode('data: {"kind":"turn"}\n\n'));
      },
      cancel() {
        isCancelled = true;
      },
    });
    for await (const event of readEvents(endless)) {
      expect(event.kind).toBe("turn");
      break;
    }
    await vi.waitFor(() => {
      expect(isCancelled).toBe(true);
    });
  });
});

describe("ask", () => {
  const request = { question: "Why?", temperature: 0, environment: "" };
  const signal = new AbortController().signal;

  it("sends the question", async () => {
    let sent: unknown;
    const reply: typeof fetch = (input, init) => {
      sent = [input, init?.method, JSON.parse(init?.body as string)];
      return Promise.resolve(new Response(streamOf('data: {"kind":"end","answer":"Because"}\n\n')));
    };
    vi.stubGlobal("fetch", reply);
    expect(await collect(ask("a run", request, signal))).toEqual([{ kind: "end", answer: "Because" }]);
    expect(sent).toEqual(["/api/runs/a%20run/ask", "POST", request]);
  });
  it("throws the server's sentence", async () => {
    vi.stubGlobal("fetch", () => Promise.resolve(Response.json({ detail: "the run has ended" }, { status: 503 })));
    await expect(collect(ask("r", request, signal))).rejects.toThrow("the run has ended");
  });
  it("says so when the answer breaks off", async () => {
    vi.stubGlobal("fetch", () => Promise.resolve(new Response(streamOf('data: {"kind":"turn"}\n\n'))));
    await expect(collect(ask("r", request, signal))).rejects.toThrow("broke before the answer was complete");
  });
});
