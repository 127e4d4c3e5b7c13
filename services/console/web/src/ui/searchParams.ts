// Typed state in the address: what a page shows can be sent to somebody as a link.
import { useCallback } from "react";
import { useLocation, useSearchParams } from "react-router";

/** How a value is written in the address; `read` returns undefined for what is no such value. */
export interface Codec<Value> {
  read: (text: string) => Value | undefined;
  write: (value: Value) => string;
}

export const asText: Codec<string> = { read: (text) => text, write: (value) => value };

export const asNumber: Codec<number> = {
  read: (text) => (text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : undefined),
  write: String,
};

export const asFlag: Codec<boolean> = {
  read: (text) => (text === "1" ? true : text === "0" ? false : undefined),
  write: (value) => (value ? "1" : "0"),
};

export function asOneOf<const Choice extends string>(choices: readonly Choice[]): Codec<Choice> {
  return { read: (text) => choices.find((choice) => choice === text), write: (value) => value };
}

/** A list, whose elements contain no comma. */
export const asList: Codec<string[]> = {
  read: (text) => text.split(",").filter((element) => element !== ""),
  write: (value) => value.join(","),
};

/** What the address becomes after the changes of this moment: React Router itself would keep only the last of them. */
let pending: URLSearchParams | null = null;

function change(before: URLSearchParams, values: Record<string, string | null>): URLSearchParams {
  const after = new URLSearchParams(pending ?? before);
  for (const [name, value] of Object.entries(values)) {
    if (value === null) after.delete(name);
    else after.set(name, value);
  }
  pending = after;
  queueMicrotask(() => {
    pending = null;
  });
  return after;
}

/**
 * Keeps a value in the address. The default is not written. Typing replaces the entry of the history; `push` adds one,
 * for what the reader expects the back button to undo.
 */
export function useSearchParam<Value>(
  name: string,
  codec: Codec<Value>,
  fallback: Value,
  { push = false }: { push?: boolean } = {},
): [Value, (value: Value) => void] {
  const [search, setSearch] = useSearchParams();
  const { state } = useLocation() as { state: unknown };
  const text = search.get(name);
  const value = text === null ? fallback : (codec.read(text) ?? fallback);
  const fallbackText = codec.write(fallback);
  const set = useCallback(
    (next: Value) => {
      const written = codec.write(next);
      setSearch((before) => change(before, { [name]: written === fallbackText ? null : written }), {
        replace: !push,
        state,
      });
    },
    [setSearch, name, codec, fallbackText, push, state],
  );
  return [value, set];
}

/** Changes several values of the address at once; null removes one. What the page was opened with (its state) stays. */
export function useSetSearch(): (values: Record<string, string | null>) => void {
  const [, setSearch] = useSearchParams();
  const { state } = useLocation() as { state: unknown };
  return useCallback(
    (values) => {
      setSearch((before) => change(before, values), { replace: true, state });
    },
    [setSearch, state],
  );
}
