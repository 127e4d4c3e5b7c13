import { SimpleGrid, Stack, Text } from "@mantine/core";
import { useParams } from "react-router";
import { api, type Model } from "../api/client";
import { paths } from "../app/paths";
import { Delivery } from "../health/Delivery";
import "../health/health.css";
import { ServiceCard } from "../health/ServiceCard";
import { useSeconds } from "../health/useSeconds";
import { formatTime } from "../ui/format";
import { Notice } from "../ui/Notice";
import { Page } from "../ui/Page";
import { EmptyState, QueryState } from "../ui/states";

const REFRESH_MS = 2_000;

function Health({ health, readAt }: { health: Model<"HealthDetail">; readAt: number }) {
  // By the browser's clock alone: the server's may differ.
  const elapsed = Math.max(0, useSeconds() - readAt);
  return (
    <Stack gap="md">
      {!health.is_reachable && (
        <Notice tone="calm" title="No service answers" testId="health-over">
          {health.problem ?? "The services of this run have stopped."}
        </Notice>
      )}
      {health.is_reachable && health.problem !== null && (
        <Notice tone="warn" title="Not everything is well" testId="health-problem">
          {health.problem}
        </Notice>
      )}
      {health.services.length === 0 && health.is_reachable && (
        <EmptyState title="No services are known">The run writes their addresses when it starts.</EmptyState>
      )}
      <SimpleGrid cols={{ base: 1, md: 2 }} spacing="md">
        {health.services.map((service) => (
          <ServiceCard key={service.name} service={service} elapsed={elapsed} isOver={!health.is_reachable} />
        ))}
        {health.is_reachable && <Delivery health={health} />}
      </SimpleGrid>
    </Stack>
  );
}

export default function HealthPage() {
  const { run = "" } = useParams();
  const health = api.useQuery(
    "get",
    "/api/runs/{run}/health",
    { params: { path: { run } } },
    // Paused while the page is hidden.
    { refetchInterval: REFRESH_MS, staleTime: 0 },
  );
  return (
    <Page
      title="Health"
      crumbs={[{ label: run, to: paths.run(run) }]}
      aside={
        health.data !== undefined && (
          <Text size="sm" className="quiet" data-testid="health-checked" data-checked={health.data.checked}>
            read {formatTime(health.data.checked)}, again every 2 s
          </Text>
        )
      }
    >
      <QueryState query={health}>{(data) => <Health health={data} readAt={health.dataUpdatedAt / 1000} />}</QueryState>
    </Page>
  );
}
