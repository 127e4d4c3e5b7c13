import { act, screen } from "@testing-library/react";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { renderAt } from "../testing/render";
import { ConnectionNotice, listStale, useEvents, useLiveRuns, type Change } from "./events";

/** The browser's EventSource, which jsdom lacks; tests send what a server would. */
class Source {
  static readonly CLOSED = 2;
  static all: Source[] = [];
  onopen: (() => void) | null = null;
  onmessage: ((event: { data: string }) => void) | null = null;
  onerror: (() => void) | null = null;
  readyState = 0;

  constructor(readonly url: string) {
    Source.all.push(this);
  }

  close() {
    this.readyState = Source.CLOSED;
  }
}

beforeEach(() => {
  Source.all = [];
  vi.stubGlobal("EventSource", Source);
  vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout"] });
});
afterEach(() => {
  vi.useRealTimers();
});

function newest(): Source {
  const source = Source.all.at(-1);
  if (source === undefined) throw new Error("no stream was opened");
  return source;
}

const CHANGE: Change = {
  run: "a",
  state: "running",
  progress: { phase: "train", detail: "", done: 1, total: 2, left_s: null },
  step: 3,
  saved_steps: 1,
  validations: 1,
  marks: 0,
};

test("a stream that the server refuses is opened again, and what was missed is fetched", () => {
  const onEvent = vi.fn();
  const onBack = vi.fn();
  function Probe() {
    useEvents("/api/events", onEvent, onBack);
    return <ConnectionNotice />;
  }
  renderAt(<Probe />);
  act(() => newest().onopen?.());
  expect(onBack).not.toHaveBeenCalled();
  act(() => {
    newest().readyState = Source.CLOSED;
    newest().onerror?.();
  });
  expect(screen.getByText("Connection lost")).toBeInTheDocument();
  expect(Source.all).toHaveLength(1);
  act(() => {
    vi.advanceTimersByTime(2_000);
  });
  expect(Source.all).toHaveLength(2);
  act(() => newest().onopen?.());
  expect(screen.getByText("Connection back")).toBeInTheDocument();
  expect(onBack).toHaveBeenCalledOnce();
  act(() => newest().onmessage?.({ data: '{"step": 4}' }));
  expect(onEvent).toHaveBeenCalledExactlyOnceWith({ step: 4 });
  act(() => {
    vi.advanceTimersByTime(4_000);
  });
  expect(screen.queryByText("Connection back")).toBeNull();
});

test("a stream that breaks is left to the browser, and closed with its page", () => {
  function Probe() {
    useEvents("/api/events", vi.fn());
    return <ConnectionNotice />;
  }
  const { unmount } = renderAt(<Probe />);
  act(() => newest().onerror?.());
  act(() => {
    vi.advanceTimersByTime(60_000);
  });
  expect(Source.all).toHaveLength(1);
  unmount();
  expect(newest().readyState).toBe(Source.CLOSED);
  renderAt(<ConnectionNotice />);
  expect(screen.queryByText("Connection lost")).toBeNull();
});

test("progress alone costs no request; a step makes curves old; a step file makes trajectories old", () => {
  expect(listStale(CHANGE, { ...CHANGE, progress: { ...CHANGE.progress, done: 2 } })).toEqual([]);
  const stepped = listStale(CHANGE, { ...CHANGE, step: 4 });
  expect(stepped).toContain("/api/runs/{run}/curves");
  expect(stepped).not.toContain("/api/runs/{run}/trajectories");
  expect(listStale(CHANGE, { ...CHANGE, saved_steps: 2 })).toContain("/api/runs/{run}/trajectories");
  expect(listStale(CHANGE, { ...CHANGE, state: "done" })).toContain("/api/runs");
  expect(listStale(undefined, CHANGE)).toEqual([]);
});

test("a change of one run does not make another's answers old, and shows its progress at once", () => {
  function Probe() {
    useLiveRuns(null);
    return null;
  }
  const { client } = renderAt(<Probe />);
  const curves = (run: string) => ["get", "/api/runs/{run}/curves", { params: { path: { run } } }];
  client.setQueryData(curves("a"), {});
  client.setQueryData(curves("b"), {});
  client.setQueryData(["get", "/api/runs", undefined], {
    folder: "runs",
    runs: [
      { id: "a", step: 1 },
      { id: "b", step: 1 },
    ],
  });
  act(() => newest().onmessage?.({ data: JSON.stringify(CHANGE) }));
  expect(client.getQueryState(curves("a"))?.isInvalidated).toBe(false);
  act(() => newest().onmessage?.({ data: JSON.stringify({ ...CHANGE, step: 4 }) }));
  expect(client.getQueryState(curves("a"))?.isInvalidated).toBe(true);
  expect(client.getQueryState(curves("b"))?.isInvalidated).toBe(false);
  expect(client.getQueryData(["get", "/api/runs", undefined])).toMatchObject({
    runs: [
      { id: "a", step: 4, state: "running" },
      { id: "b", step: 1 },
    ],
  });
});

test("a tab that nobody sees holds no connection, and catches up when it is seen again", () => {
  const onBack = vi.fn();
  function Probe() {
    useEvents("/api/events", vi.fn(), onBack);
    return <ConnectionNotice />;
  }
  const visibility = vi.spyOn(document, "visibilityState", "get");
  const show = (state: DocumentVisibilityState) => {
    visibility.mockReturnValue(state);
    act(() => {
      document.dispatchEvent(new Event("visibilitychange"));
    });
  };
  renderAt(<Probe />);
  act(() => newest().onopen?.());
  show("hidden");
  expect(Source.all.map(({ readyState }) => readyState)).toEqual([Source.CLOSED]);
  expect(screen.queryByText("Connection lost")).not.toBeInTheDocument();
  show("visible");
  expect(Source.all).toHaveLength(2);
  act(() => newest().onopen?.());
  expect(onBack).toHaveBeenCalledOnce();
  act(() => {
    window.dispatchEvent(new Event("pagehide"));
  });
  expect(newest().readyState).toBe(Source.CLOSED);
  visibility.mockRestore();
});
