// The filter of the list of trajectories as it stands in the address.
import { formatNumber } from "../ui/format";
import type { operations } from "../api/schema";

export type ListQuery = NonNullable<operations["list_trajectories"]["parameters"]["query"]>;
export type Filter = Omit<ListQuery, "sort" | "order" | "offset" | "limit">;
export type Sort = NonNullable<ListQuery["sort"]>;
export type Order = NonNullable<ListQuery["order"]>;

const SORTS: readonly Sort[] = [
  "place",
  "reward",
  "em",
  "advantage",
  "search_advantage",
  "mismatch",
  "searches",
  "turns",
  "tokens",
];
const ORDERS: readonly Order[] = ["ascending", "descending"];
const TEXTS = ["place", "reason", "uid", "text"] as const;
const LISTS = ["source", "status"] as const;
const FLAGS = ["right", "truncated", "finished", "trained"] as const;
const NUMBERS = [
  "step_min",
  "step_max",
  "reward_min",
  "reward_max",
  "searches_min",
  "searches_max",
  "version_min",
  "version_max",
] as const;

export const EVERY_STEP = "steps";
/** Everything that a filter or an order may write into the address. */
export const NAMES: readonly string[] = [...TEXTS, ...LISTS, ...FLAGS, ...NUMBERS, "sort", "order"];

/** Reads filter and order from the address; what is no such value is left out. */
export function readQuery(search: URLSearchParams): ListQuery {
  const query: ListQuery = {};
  for (const name of TEXTS) {
    const text = search.get(name);
    if (text !== null && text.trim() !== "") query[name] = text;
  }
  for (const name of LISTS) {
    const values = search.getAll(name).filter((value) => value !== "");
    if (values.length > 0) query[name] = values;
  }
  for (const name of FLAGS) {
    const text = search.get(name) ?? "";
    if (["1", "true", "0", "false"].includes(text)) query[name] = text === "1" || text === "true";
  }
  for (const name of NUMBERS) {
    const text = search.get(name)?.trim() ?? "";
    if (text !== "" && Number.isFinite(Number(text))) query[name] = Number(text);
  }
  const sort = SORTS.find((one) => one === search.get("sort"));
  const order = ORDERS.find((one) => one === search.get("order"));
  if (sort !== undefined) query.sort = sort;
  if (order !== undefined) query.order = order;
  return query;
}

/** Writes filter and order into an address, and keeps what else is in it. */
export function writeQuery(query: ListQuery, rest: URLSearchParams = new URLSearchParams()): URLSearchParams {
  const search = new URLSearchParams(rest);
  for (const name of NAMES) search.delete(name);
  for (const name of TEXTS) {
    const value = query[name];
    if (value && !(name === "place" && value === EVERY_STEP)) search.set(name, value);
  }
  for (const name of LISTS) for (const value of query[name] ?? []) search.append(name, value);
  for (const name of FLAGS) {
    const value = query[name];
    if (typeof value === "boolean") search.set(name, value ? "1" : "0");
  }
  for (const name of NUMBERS) {
    const value = query[name];
    if (typeof value === "number") search.set(name, String(value));
  }
  if (query.sort !== undefined && query.sort !== "place") search.set("sort", query.sort);
  if (query.order !== undefined && query.order !== "descending") search.set("order", query.order);
  return search;
}

/** The filter alone, for an export. */
export function takeFilter(query: ListQuery): Filter {
  const filter = { ...query };
  delete filter.sort;
  delete filter.order;
  delete filter.offset;
  delete filter.limit;
  return filter;
}

export interface Chip {
  key: string;
  label: string;
  /** What the filter is without it. */
  without: ListQuery;
}

const WORDS: Record<(typeof FLAGS)[number], [string, string]> = {
  right: ["right", "wrong"],
  truncated: ["truncated", "not truncated"],
  finished: ["finished", "without an answer"],
  trained: ["trained on", "not trained on"],
};

/** What is filtered, one chip each. */
export function listChips(query: ListQuery): Chip[] {
  const chips: Chip[] = [];
  const add = (key: string, label: string, ...names: (keyof ListQuery)[]) => {
    const without = { ...query };
    for (const name of names) Reflect.deleteProperty(without, name);
    chips.push({ key, label, without });
  };
  if (query.place && query.place !== EVERY_STEP) add("place", query.place, "place");
  if (query.text) add("text", `“${query.text}”`, "text");
  if (query.uid)
    add("uid", query.uid.endsWith("/") ? `question ${query.uid.slice(0, -1)}` : `group ${query.uid}`, "uid");
  for (const name of LISTS) {
    for (const value of query[name] ?? []) {
      const rest = (query[name] ?? []).filter((one) => one !== value);
      const without: ListQuery = { ...query, [name]: rest };
      if (rest.length === 0) Reflect.deleteProperty(without, name);
      chips.push({ key: `${name}-${value}`, label: value, without });
    }
  }
  if (query.reason) add("reason", query.reason, "reason");
  for (const name of FLAGS) {
    const value = query[name];
    if (typeof value === "boolean") add(name, WORDS[name][value ? 0 : 1], name);
  }
  for (const name of ["step", "reward", "searches", "version"] as const) {
    const label = describeRange(name, query[`${name}_min`], query[`${name}_max`]);
    if (label !== null) add(name, label, `${name}_min`, `${name}_max`);
  }
  return chips;
}

function describeRange(name: string, low: number | null | undefined, high: number | null | undefined): string | null {
  const [hasLow, hasHigh] = [typeof low === "number", typeof high === "number"];
  if (hasLow && hasHigh)
    return low === high ? `${name} ${formatNumber(low)}` : `${name} ${formatNumber(low)}–${formatNumber(high)}`;
  if (hasLow) return `${name} ≥ ${formatNumber(low)}`;
  return hasHigh ? `${name} ≤ ${formatNumber(high)}` : null;
}

export interface Preset {
  label: string;
  query: ListQuery;
}

export const FAILURES = ["ABSTAIN", "INVALID_INPUT", "TIMEOUT", "INTERNAL"];

/** Questions that people ask often; each is a filter and an order. */
export const PRESETS: readonly Preset[] = [
  { label: "Searching reinforced most", query: { searches_min: 1, sort: "search_advantage" } },
  { label: "Searching punished most", query: { searches_min: 1, sort: "search_advantage", order: "ascending" } },
  { label: "Largest mismatch", query: { sort: "mismatch" } },
  { label: "Failed", query: { status: FAILURES } },
  { label: "Truncated", query: { truncated: true, sort: "tokens" } },
  { label: "Long and wrong", query: { right: false, sort: "tokens" } },
];

/** A preset within the steps or the place that the reader looks at. */
export function applyPreset(preset: Preset, query: ListQuery): ListQuery {
  const kept: ListQuery = {};
  for (const name of ["place", "step_min", "step_max", "source"] as const) {
    if (query[name] !== undefined) Object.assign(kept, { [name]: query[name] });
  }
  return { ...kept, ...preset.query };
}

/** The column's next order: descending first, then ascending, then none, which is the newest step first. */
export function toggleSort(query: ListQuery, sort: Sort): ListQuery {
  const { sort: current = "place", order, ...rest } = query;
  if (current !== sort) return { ...rest, sort };
  return order === "ascending" ? rest : { ...rest, sort, order: "ascending" };
}
