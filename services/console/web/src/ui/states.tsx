// What a page shows instead of its content: it loads, there is nothing, or something failed.
import { Alert, Button, Group, Skeleton, Stack, Text } from "@mantine/core";
import type { ReactNode } from "react";
import { describeError } from "../api/errors";

export function Loading({ lines = 4, label = "Loading" }: { lines?: number; label?: string }) {
  return (
    <Stack gap="xs" role="status" aria-label={label} data-testid="loading">
      {Array.from({ length: lines }, (_, line) => (
        <Skeleton key={line} height={line === 0 ? 28 : 16} width={`${100 - 12 * (line % 4)}%`} />
      ))}
    </Stack>
  );
}

/** `title` says what is missing, the children what to do about it. */
export function EmptyState({ title, children }: { title: string; children?: ReactNode }) {
  return (
    <Stack gap={4} p="lg" className="card" data-testid="empty">
      <Text fw={600}>{title}</Text>
      {children !== undefined && (
        <Text component="div" className="quiet">
          {children}
        </Text>
      )}
    </Stack>
  );
}

interface ErrorProps {
  error: unknown;
  remedy?: string | undefined;
  onRetry?: (() => void) | undefined;
}

export function ErrorState({ error, remedy, onRetry }: ErrorProps) {
  return (
    <Alert color="red" role="alert" title="This did not work" data-testid="error" className="error-state">
      <Group justify="space-between" align="flex-start">
        <div>
          <Text size="sm">{describeError(error)}</Text>
          {remedy !== undefined && <Text size="sm">{remedy}</Text>}
        </div>
        {onRetry && (
          <Button variant="default" size="xs" onClick={onRetry}>
            Try again
          </Button>
        )}
      </Group>
    </Alert>
  );
}

interface QueryLike<Data> {
  data: Data | undefined;
  error: unknown;
  refetch: () => unknown;
}

/** Shows a query's data as soon as there is any; data that could not be refreshed stays, under the error. */
export function QueryState<Data>({
  query,
  children,
  loading = <Loading />,
}: {
  query: QueryLike<Data>;
  children: (data: Data) => ReactNode;
  loading?: ReactNode;
}) {
  const retry = () => void query.refetch();
  if (query.data === undefined) {
    return query.error ? <ErrorState error={query.error} onRetry={retry} /> : <>{loading}</>;
  }
  return (
    <>
      {query.error ? <ErrorState error={query.error} onRetry={retry} /> : null}
      {children(query.data)}
    </>
  );
}
