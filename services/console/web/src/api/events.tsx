// Server-sent events: what changed on the server makes queries fetch again.
import { Notification } from "@mantine/core";
import { useQueryClient, type QueryClient } from "@tanstack/react-query";
import { useEffect, useEffectEvent, useRef, useState, useSyncExternalStore } from "react";
import type { Model } from "./client";

const RETRY_MS = 2_000;
const BACK_MS = 4_000;

/** The streams that are broken now, by address; the notice shows whether there is one. */
const lost = new Set<string>();
const listeners = new Set<() => void>();

function setLost(url: string, isLost: boolean): void {
  if (lost.has(url) === isLost) return;
  if (isLost) lost.add(url);
  else lost.delete(url);
  for (const listener of listeners) listener();
}

/**
 * Listens to a stream of events while the component is shown, and connects again when it breaks. `onBack` runs after
 * such a break: events were missed, so what is shown may be old. A tab that is hidden does not listen.
 */
export function useEvents(url: string | null, onEvent: (data: unknown) => void, onBack?: () => void): void {
  const handle = useEffectEvent(onEvent);
  const handleBack = useEffectEvent(() => onBack?.());
  useEffect(() => {
    if (url === null) return undefined;
    let source: EventSource;
    let timer: ReturnType<typeof setTimeout> | undefined;
    let wasLost = false;
    const connect = () => {
      source = new EventSource(url);
      source.onmessage = (event: MessageEvent<string>) => {
        handle(JSON.parse(event.data));
      };
      source.onopen = () => {
        setLost(url, false);
        if (wasLost) handleBack();
        wasLost = false;
      };
      source.onerror = () => {
        wasLost = true;
        setLost(url, true);
        // A browser tries again by itself after a broken connection, but not after an answer that is no stream.
        if (source.readyState === EventSource.CLOSED) timer = setTimeout(connect, RETRY_MS);
      };
    };
    const disconnect = () => {
      clearTimeout(timer);
      source.close();
      setLost(url, false);
    };
    // A browser has six connections to a server for all its tabs: what nobody sees must not hold one.
    const onShown = () => {
      disconnect();
      if (document.visibilityState === "hidden") return;
      wasLost = true;
      connect();
    };
    const onReturn = ({ persisted }: PageTransitionEvent) => {
      if (persisted) onShown();
    };
    connect();
    document.addEventListener("visibilitychange", onShown);
    window.addEventListener("pagehide", disconnect);
    window.addEventListener("pageshow", onReturn);
    return () => {
      document.removeEventListener("visibilitychange", onShown);
      window.removeEventListener("pagehide", disconnect);
      window.removeEventListener("pageshow", onReturn);
      disconnect();
    };
  }, [url]);
}

/** Answers of the run that depend on its step files and validations. */
const STORED = [
  "/api/runs/{run}/trajectories",
  "/api/runs/{run}/facets",
  "/api/runs/{run}/steps/{step}",
  "/api/runs/{run}/questions",
  "/api/runs/{run}/questions/{uid}",
];

/** Lists the addresses whose answers a change makes old; all that depend on the run where nothing is known before. */
export function listStale(before: Change | undefined, after: Change): string[] {
  const stale: string[] = [];
  if (before === undefined) return stale;
  const stepped = before.step !== after.step;
  const stored = before.saved_steps !== after.saved_steps || before.validations !== after.validations;
  if (stepped || stored || before.state !== after.state || before.marks !== after.marks) {
    stale.push("/api/runs", "/api/runs/{run}", "/api/runs/{run}/curves");
  }
  if (stored) stale.push(...STORED, "/api/compare");
  return stale;
}

export type Change = Model<"RunChange">;

interface Init {
  params?: { path?: { run?: string } };
}

function invalidate(queries: QueryClient, addresses: string[], run: string): void {
  if (addresses.length === 0) return;
  void queries.invalidateQueries({
    predicate: ({ queryKey: [, address, init] }) => {
      const of = (init as Init | undefined)?.params?.path?.run;
      return addresses.includes(address as string) && (of === undefined || of === run);
    },
  });
}

/** Writes state and progress of a change into the answers that show them, which costs no request. */
function applyProgress(queries: QueryClient, { run, state, progress, step }: Change): void {
  const patch = (row: Model<"RunRow">) => (row.id === run ? { ...row, state, progress, step } : row);
  queries.setQueriesData<Model<"RunList">>(
    { queryKey: ["get", "/api/runs"] },
    (list) => list && { ...list, runs: list.runs.map(patch) },
  );
  queries.setQueriesData<Model<"RunDetail">>(
    { queryKey: ["get", "/api/runs/{run}"] },
    (detail) => detail && { ...detail, run: patch(detail.run) },
  );
}

/** Whether a list of runs is shown that lacks this one, because it is new. */
function isNew(queries: QueryClient, run: string): boolean {
  const lists = queries.getQueriesData<Model<"RunList">>({ queryKey: ["get", "/api/runs"] });
  return lists.some(([, list]) => list?.runs.every(({ id }) => id !== run));
}

/** Keeps what is shown about one run current, or with null about all runs. The frame of the pages calls it. */
export function useLiveRuns(run: string | null): void {
  const queries = useQueryClient();
  const known = useRef(new Map<string, Change>());
  useEvents(
    run === null ? "/api/events" : `/api/runs/${encodeURIComponent(run)}/events`,
    (data) => {
      const change = data as Change;
      applyProgress(queries, change);
      if (isNew(queries, change.run)) invalidate(queries, ["/api/runs"], change.run);
      invalidate(queries, listStale(known.current.get(change.run), change), change.run);
      known.current.set(change.run, change);
    },
    () => void queries.invalidateQueries(),
  );
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => void listeners.delete(listener);
}

/** Whether every stream of the page is connected. */
export function useConnection(): "open" | "lost" {
  return useSyncExternalStore(subscribe, () => (lost.size > 0 ? "lost" : "open"));
}

/** Says that the connection is lost, and for a moment that it is back. */
export function ConnectionNotice() {
  const connection = useConnection();
  const [shown, setShown] = useState<"lost" | "back" | null>(null);
  if (connection === "lost" && shown !== "lost") setShown("lost");
  if (connection === "open" && shown === "lost") setShown("back");
  useEffect(() => {
    if (shown !== "back") return undefined;
    const timer = setTimeout(() => {
      setShown(null);
    }, BACK_MS);
    return () => {
      clearTimeout(timer);
    };
  }, [shown]);
  return (
    <div role="status" data-testid="connection" data-connection={connection}>
      {shown === "lost" && (
        <Notification withCloseButton={false} color="red" title="Connection lost" mb="sm">
          What you see may be old. The page connects again by itself; is `forage console` still running?
        </Notification>
      )}
      {shown === "back" && (
        <Notification withCloseButton={false} color="accent" title="Connection back" mb="sm">
          The page is current again.
        </Notification>
      )}
    </div>
  );
}
