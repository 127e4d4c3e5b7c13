// Addresses of the pages. Every link is built here, so that what is in a path is escaped once.
const part = encodeURIComponent;

export interface Query {
  [name: string]: string | number | boolean | null | undefined;
}

/** Appends the values that are set to a path. */
export function withQuery(path: string, query: Query = {}): string {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") search.set(name, String(value));
  }
  const text = search.toString();
  return text === "" ? path : `${path}?${text}`;
}

export const paths = {
  runs: () => "/",
  compare: (a?: string, b?: string) => withQuery("/compare", { a, b }),
  run: (run: string) => `/runs/${part(run)}`,
  step: (run: string, step: number | string) => `/runs/${part(run)}/steps/${part(String(step))}`,
  trajectories: (run: string, query?: Query) => withQuery(`/runs/${part(run)}/trajectories`, query),
  trajectory: (run: string, place: string, row: number, query?: Query) =>
    withQuery(`/runs/${part(run)}/trajectories/${part(place)}/${row}`, query),
  group: (run: string, place: string, uid: string) => `/runs/${part(run)}/groups/${part(place)}/${part(uid)}`,
  questions: (run: string, query?: Query) => withQuery(`/runs/${part(run)}/questions`, query),
  question: (run: string, uid: string, query?: Query) => withQuery(`/runs/${part(run)}/questions/${part(uid)}`, query),
  health: (run: string) => `/runs/${part(run)}/health`,
  ask: (run: string, query?: Query) => withQuery(`/runs/${part(run)}/ask`, query),
};
