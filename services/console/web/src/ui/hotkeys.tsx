// Keys of a page. Each component registers its own; `?` lists all that are active.
import { createContext, use, useEffect, useEffectEvent, useMemo, useState, type ReactNode } from "react";

export interface Hotkey {
  /** One key ("j", "Enter", "/"), or two after each other ("g r"). */
  keys: string;
  label: string;
  run: (event: KeyboardEvent) => void;
}

interface Registry {
  add: (hotkeys: Hotkey[]) => () => void;
  list: () => Hotkey[];
}

const SEQUENCE_MS = 1000;
const Context = createContext<Registry | null>(null);

function createRegistry(): Registry {
  const groups: Hotkey[][] = [];
  return {
    add(hotkeys) {
      groups.push(hotkeys);
      return () => void groups.splice(groups.indexOf(hotkeys), 1);
    },
    // The newest first: what opened last, an overlay or a list, has the key.
    list: () => groups.toReversed().flat(),
  };
}

/** Whether the reader is writing, or a key means something to the focused element itself. */
function isTaken(event: KeyboardEvent): boolean {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return true;
  const target = event.composedPath()[0];
  if (!(target instanceof HTMLElement)) return false;
  if (target.isContentEditable || target.matches("textarea, select, [role=textbox], [role=listbox]")) return true;
  if (target instanceof HTMLInputElement) return !["checkbox", "radio", "button"].includes(target.type);
  return event.key === "Enter" && target.matches("a, button, summary");
}

export function HotkeysProvider({ children }: { children: ReactNode }) {
  const [registry] = useState(createRegistry);
  useEffect(() => {
    let first = "";
    let pressedAt = 0;
    const onKey = (event: KeyboardEvent) => {
      if (isTaken(event)) return;
      const hotkeys = registry.list();
      const isSequence = first !== "" && event.timeStamp - pressedAt < SEQUENCE_MS;
      const pressed = isSequence ? `${first} ${event.key}` : event.key;
      const hotkey = hotkeys.find(({ keys }) => keys === pressed);
      const begins = !isSequence && hotkeys.some(({ keys }) => keys.startsWith(`${event.key} `));
      first = begins ? event.key : "";
      pressedAt = event.timeStamp;
      if (hotkey === undefined) return;
      event.preventDefault();
      hotkey.run(event);
    };
    document.addEventListener("keydown", onKey);
    return () => {
      document.removeEventListener("keydown", onKey);
    };
  }, [registry]);
  return <Context value={registry}>{children}</Context>;
}

function useRegistry(): Registry {
  const registry = use(Context);
  if (registry === null) throw new Error("useHotkeys needs a HotkeysProvider around it");
  return registry;
}

/** Registers keys while the component is shown; `run` may change from one rendering to the next. */
export function useHotkeys(hotkeys: Hotkey[], enabled = true): void {
  const registry = useRegistry();
  const run = useEffectEvent((keys: string, event: KeyboardEvent) => {
    hotkeys.find((hotkey) => hotkey.keys === keys)?.run(event);
  });
  const names = JSON.stringify(hotkeys.map(({ keys, label }) => [keys, label]));
  const registered = useMemo(() => JSON.parse(names) as [string, string][], [names]);
  useEffect(() => {
    if (!enabled) return undefined;
    return registry.add(
      registered.map(([keys, label]) => ({
        keys,
        label,
        run: (event) => {
          run(keys, event);
        },
      })),
    );
  }, [registry, registered, enabled]);
}

/** Returns a function that lists the keys that are active now, once each. */
export function useHotkeyList(): () => Hotkey[] {
  const registry = useRegistry();
  return () => {
    const seen = new Map<string, Hotkey>();
    for (const hotkey of registry.list()) if (!seen.has(hotkey.keys)) seen.set(hotkey.keys, hotkey);
    return [...seen.values()];
  };
}
