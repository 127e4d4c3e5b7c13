// What was asked in this session of the browser, and what came back.
import { useCallback, useEffect, useReducer, useRef } from "react";
import { describeError } from "../api/errors";
import { ask, type AskEvent, type AskRequest } from "./stream";

export interface Exchange {
  id: number;
  request: AskRequest;
  events: AskEvent[];
  state: "asking" | "done" | "stopped" | "failed";
  /** The sentence of a failure. */
  error: string | null;
  /** Of the policy that answers, as soon as it is known. */
  version: number | null;
}

export type Action =
  | { kind: "begin"; id: number; request: AskRequest }
  | { kind: "event"; id: number; event: AskEvent }
  | { kind: "stop"; id: number }
  | { kind: "fail"; id: number; error: string }
  | { kind: "forget" };

const KEPT = 30;

/** Applies one action to the exchanges, the newest of which is the first. */
export function update(exchanges: Exchange[], action: Action): Exchange[] {
  if (action.kind === "forget") return exchanges.filter((exchange) => exchange.state === "asking");
  if (action.kind === "begin") {
    const { id, request } = action;
    const begun: Exchange = { id, request, events: [], state: "asking", error: null, version: null };
    return [begun, ...exchanges].slice(0, KEPT);
  }
  return exchanges.map((exchange) => (exchange.id === action.id ? change(exchange, action) : exchange));
}

function change(exchange: Exchange, action: Exclude<Action, { kind: "forget" | "begin" }>): Exchange {
  // What arrives after the end, such as the error of a request that was stopped, changes nothing.
  if (exchange.state !== "asking") return exchange;
  if (action.kind === "stop") return { ...exchange, state: "stopped" };
  if (action.kind === "fail") return { ...exchange, state: "failed", error: action.error };
  const { event } = action;
  const version = event.version ?? exchange.version;
  if (event.kind === "error") return { ...exchange, version, state: "failed", error: event.text };
  const state = event.kind === "end" ? "done" : "asking";
  return { ...exchange, version, state, events: [...exchange.events, event] };
}

const keyOf = (run: string) => `forage.ask.${run}`;

/** Reads what an earlier page of this session kept; an answer that was still being written was stopped by leaving. */
export function load(run: string): Exchange[] {
  try {
    const kept = JSON.parse(sessionStorage.getItem(keyOf(run)) ?? "[]") as Exchange[];
    return kept.map((exchange) => (exchange.state === "asking" ? { ...exchange, state: "stopped" } : exchange));
  } catch {
    return [];
  }
}

function save(run: string, exchanges: Exchange[]): void {
  try {
    sessionStorage.setItem(keyOf(run), JSON.stringify(exchanges));
  } catch {
    // The browser keeps nothing, or no more: the page works without.
  }
}

export function useExchanges(run: string) {
  const [exchanges, dispatch] = useReducer(update, run, load);
  const current = useRef<{ id: number; stop: AbortController } | null>(null);

  useEffect(() => {
    save(run, exchanges);
  }, [run, exchanges]);

  const stop = useCallback(() => {
    const asked = current.current;
    if (asked === null) return;
    current.current = null;
    dispatch({ kind: "stop", id: asked.id });
    asked.stop.abort();
  }, []);

  // Leaving the page ends the request.
  useEffect(() => stop, [stop]);

  const begin = useCallback(
    async (request: AskRequest) => {
      stop();
      const id = Date.now();
      const controller = new AbortController();
      current.current = { id, stop: controller };
      dispatch({ kind: "begin", id, request });
      try {
        for await (const event of ask(run, request, controller.signal)) dispatch({ kind: "event", id, event });
      } catch (error) {
        dispatch({ kind: "fail", id, error: describeError(error) });
      }
    },
    [run, stop],
  );

  const forget = useCallback(() => {
    dispatch({ kind: "forget" });
  }, []);
  return { exchanges, begin, stop, forget };
}
