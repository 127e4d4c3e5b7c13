import { keepPreviousData, useInfiniteQuery } from "@tanstack/react-query";
import { useCallback, useMemo } from "react";
import { client, type Model } from "../api/client";

export interface QuestionFilter {
  text: string;
  source: string;
  watched: boolean;
  changed: boolean;
}

const PAGE = 100;

/** The questions that pass a filter, page by page. */
export function useQuestions(run: string, { text, source, watched, changed }: QuestionFilter) {
  const wanted = {
    ...(text !== "" && { text }),
    ...(source !== "" && { source }),
    ...(watched && { watched: true }),
    ...(changed && { changed: true }),
  };
  const query = useInfiniteQuery({
    // As the queries of openapi-react-query: the frame of the pages makes it fetch again when the run has changed.
    queryKey: ["get", "/api/runs/{run}/questions", { params: { path: { run }, query: wanted } }],
    initialPageParam: 0,
    placeholderData: keepPreviousData,
    queryFn: async ({ pageParam, signal }): Promise<Model<"QuestionPage">> => {
      const { data } = await client.GET("/api/runs/{run}/questions", {
        params: { path: { run }, query: { ...wanted, offset: pageParam, limit: PAGE } },
        signal,
      });
      if (data === undefined) throw new Error("the list of questions has no content");
      return data;
    },
    getNextPageParam: (last, pages) => {
      const loaded = pages.reduce((sum, page) => sum + page.rows.length, 0);
      return last.rows.length > 0 && loaded < last.total ? loaded : undefined;
    },
  });
  const { fetchNextPage, hasNextPage, isFetchingNextPage } = query;
  const readOn = useCallback(() => {
    if (hasNextPage && !isFetchingNextPage) void fetchNextPage();
  }, [fetchNextPage, hasNextPage, isFetchingNextPage]);
  const pages = query.data?.pages;
  const data = useMemo(
    () => pages && { rows: pages.flatMap((page) => page.rows), total: pages.at(-1)?.total ?? 0 },
    [pages],
  );
  return { data, error: query.error, refetch: query.refetch, readOn };
}
