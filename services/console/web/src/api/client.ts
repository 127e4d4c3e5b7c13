// The client of the console's API, typed by schema.d.ts, which `make console` generates from the server's OpenAPI.
import createFetchClient, { type Middleware } from "openapi-fetch";
import createQueries from "openapi-react-query";
import { ApiError, readDetail } from "./errors";
import type { components, paths } from "./schema";

/** A model of models/ by its name: `Model<"RunSummary">`. */
export type Model<Name extends keyof components["schemas"]> = components["schemas"][Name];

const errors: Middleware = {
  async onResponse({ response }) {
    if (response.ok) return undefined;
    if (response.status === 401) {
      const here = window.location.pathname + window.location.search;
      window.location.assign(`/login?next=${encodeURIComponent(here)}`);
    }
    throw new ApiError(response.status, readDetail(await response.text(), response.status));
  },
};

export function createApi(baseUrl = window.location.origin) {
  // The global fetch is looked up at each request, so that tests can answer in its place.
  const client = createFetchClient<paths>({ baseUrl, fetch: (request) => globalThis.fetch(request) });
  client.use(errors);
  return client;
}

/** Plain requests: `await client.GET("/api/runs")`. An answer that is no success throws an ApiError. */
export const client = createApi();

/** Requests of components: `api.useQuery("get", "/api/runs/{run}", { params: { path: { run } } })`. */
export const api = createQueries(client);
