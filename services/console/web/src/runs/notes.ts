import { notifications } from "@mantine/notifications";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { client } from "../api/client";
import type { Model } from "../api/client";
import { describeError } from "../api/errors";

type Notes = Model<"RunNotes-Output">;

/**
 * Writes notes of a run. What was written is shown at once; if the server refuses it, what was there comes back, with
 * the server's sentence. Two changes shortly after each other are written in their order.
 */
export function useWriteNotes(run: string): (change: Partial<Notes>) => void {
  const queries = useQueryClient();
  const key = { queryKey: ["get", "/api/runs"] };
  const detailKey = { queryKey: ["get", "/api/runs/{run}", { params: { path: { run } } }] };
  const read = () => {
    const rows = queries.getQueriesData<Model<"RunList">>(key).flatMap(([, list]) => list?.runs ?? []);
    const details = queries.getQueriesData<Model<"RunDetail">>(detailKey).flatMap(([, detail]) => detail?.run ?? []);
    return [...details, ...rows].find(({ id }) => id === run)?.notes;
  };
  const show = (notes: Notes) => {
    queries.setQueriesData<Model<"RunList">>(
      key,
      (list) => list && { ...list, runs: list.runs.map((row) => (row.id === run ? { ...row, notes } : row)) },
    );
    queries.setQueriesData<Model<"RunDetail">>(
      detailKey,
      (detail) => detail && { ...detail, run: { ...detail.run, notes } },
    );
  };
  const { mutate } = useMutation({
    scope: { id: `notes of ${run}` },
    mutationFn: async (notes: Notes) => {
      await client.PUT("/api/runs/{run}/notes", { params: { path: { run } }, body: notes });
    },
    onMutate: (notes) => {
      const before = read();
      show(notes);
      return { before };
    },
    onError: (error, _, context) => {
      if (context?.before) show(context.before);
      notifications.show({ color: "red", title: `The notes of ${run} were not kept`, message: describeError(error) });
    },
    onSettled: () => Promise.all([queries.invalidateQueries(key), queries.invalidateQueries(detailKey)]),
  });
  return (change) => {
    mutate({ note: "", tags: [], ...read(), ...change });
  };
}
