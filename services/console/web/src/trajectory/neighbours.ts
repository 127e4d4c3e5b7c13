// The trajectories before and after one: in the list that the reader came from, else in the file.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, type Model } from "../api/client";
import { paths } from "../app/paths";
import { readQuery } from "../trajectories/filter";
import type { Detail } from "./layout";

/** Place in the list, in the address of a trajectory that was opened from one. */
export const INDEX = "i";
/** The row of the list to return to, in the list's address. */
export const AT = "at";

export interface Neighbours {
  previous: string | null;
  next: string | null;
  /** Place in the list, from 0, and its length; null outside of a list. */
  index: number | null;
  total: number | null;
}

const STRETCH = 50;

/** Reads the place in the list; null where the trajectory was not opened from a list. */
export function readIndex(search: URLSearchParams): number | null {
  const text = search.get(INDEX) ?? "";
  return /^\d+$/.test(text) ? Number(text) : null;
}

/** The address of a trajectory; what is in `search` (filter, colours) stays. */
export function linkTrajectory(
  run: string,
  { place, row }: Model<"Address">,
  search: URLSearchParams,
  index: number | null,
): string {
  const kept = new URLSearchParams(search);
  // A token, or what was looked for, belongs to one trajectory.
  for (const name of ["token", AT, INDEX]) kept.delete(name);
  if (index !== null) kept.set(INDEX, String(index));
  const text = kept.toString();
  return paths.trajectory(run, place, row) + (text === "" ? "" : `?${text}`);
}

/** The address of the list with the filter that a trajectory was found by. */
export function linkList(run: string, search: URLSearchParams): string {
  const kept = new URLSearchParams(search);
  const index = readIndex(search);
  for (const name of ["token", "colour", "observations", "find", INDEX]) kept.delete(name);
  if (index !== null) kept.set(AT, String(index));
  const text = kept.toString();
  return paths.trajectories(run) + (text === "" ? "" : `?${text}`);
}

/** Finds what is before and after a trajectory. */
export function useNeighbours(run: string, detail: Detail | undefined, search: URLSearchParams): Neighbours {
  const index = readIndex(search);
  // A stretch of the list with a row on either side: most steps need no request, so no key is lost while one is open.
  const offset = Math.max(0, Math.floor((index ?? 0) / STRETCH) * STRETCH - 1);
  const query = { ...readQuery(search), offset, limit: STRETCH + 2 };
  const list = useQuery({
    ...api.queryOptions("get", "/api/runs/{run}/trajectories", { params: { path: { run }, query } }),
    enabled: index !== null,
    placeholderData: keepPreviousData,
  });
  const link = (address: Model<"Address"> | null | undefined, place: number | null) =>
    address == null ? null : linkTrajectory(run, address, search, place);
  if (index === null) {
    return { previous: link(detail?.previous, null), next: link(detail?.next, null), index: null, total: null };
  }
  const page = list.isPlaceholderData ? undefined : list.data;
  const at = (place: number) => page?.rows[place - offset];
  return {
    previous: index > 0 ? link(at(index - 1), index - 1) : null,
    next: link(at(index + 1), index + 1),
    index,
    total: list.data?.total ?? null,
  };
}
