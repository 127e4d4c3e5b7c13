import { keepPreviousData, useQuery, useQueryClient } from "@tanstack/react-query";
import { client, type Model } from "../api/client";
import { mergeCurves, type Curves } from "./curves";

/** What makes steps be taken again: their values are read anew. */
const AGAIN = new Set(["resume", "rollback", "restart"]);

/**
 * Reads curves and keeps them current: only steps that are new are asked for. The frame of the pages makes the query
 * fetch again when the run has changed.
 */
export function useCurves(run: string, detail: Model<"RunDetail"> | undefined, names: string[]) {
  const queries = useQueryClient();
  const again = detail?.marks.filter(({ kind }) => AGAIN.has(kind)).length ?? 0;
  const key = ["get", "/api/runs/{run}/curves", { params: { path: { run } } }, again, names];
  return useQuery({
    queryKey: key,
    enabled: detail !== undefined && names.length > 0,
    placeholderData: keepPreviousData,
    queryFn: async ({ signal }): Promise<Curves> => {
      const known = queries.getQueryData<Curves>(key);
      const last = known?.steps.at(-1) ?? 0;
      // A run that is behind what is known began anew.
      const isBehind = (queries.getQueryData<Model<"RunDetail">>(keyOf(run))?.run.step ?? last) < last;
      const after = isBehind ? 0 : last;
      const { data } = await client.GET("/api/runs/{run}/curves", {
        params: { path: { run }, query: { names, after } },
        signal,
      });
      if (data === undefined) throw new Error("the curves have no content");
      return known !== undefined && after > 0 ? mergeCurves(known, data) : data;
    },
  });
}

function keyOf(run: string): unknown[] {
  return ["get", "/api/runs/{run}", { params: { path: { run } } }];
}
