import { Badge, Group, Progress, Stack, Table, Text } from "@mantine/core";
import type { Model } from "../api/client";
import { formatBytes, formatNumber, UNKNOWN } from "../ui/format";

type Health = Model<"HealthDetail">;

function nameVersion(version: number | null, epoch: number | null): string {
  if (version === null) return UNKNOWN;
  return epoch === null || epoch <= 1 ? String(version) : `${version} (epoch ${epoch})`;
}

function Replicas({ health }: { health: Health }) {
  return (
    <Stack component="section" gap={6} p="md" className="card" data-testid="replicas">
      <Group justify="space-between">
        <Text component="h2" fw={650}>
          Engines
        </Text>
        <Text size="sm" className="quiet">
          announced policy: version {nameVersion(health.version, health.epoch)}
        </Text>
      </Group>
      {health.replicas.length === 0 ? (
        <Text className="quiet">No engine reports.</Text>
      ) : (
        <Table.ScrollContainer minWidth={300}>
          <Table>
            <Table.Thead>
              <Table.Tr>
                <Table.Th>engine</Table.Th>
                <Table.Th ta="right">version</Table.Th>
                <Table.Th>state</Table.Th>
              </Table.Tr>
            </Table.Thead>
            <Table.Tbody>
              {health.replicas.map((replica) => (
                <Table.Tr key={replica.name}>
                  <Table.Td>{replica.name}</Table.Td>
                  <Table.Td ta="right" className="number">
                    {nameVersion(replica.version, replica.epoch)}
                    {replica.version !== null && health.version !== null && replica.version < health.version && (
                      <span className="quiet"> ({health.version - replica.version} behind)</span>
                    )}
                  </Table.Td>
                  <Table.Td>
                    {replica.is_out_of_service && (
                      <Badge variant="default" className="tone tone-warn" mr={6}>
                        out of service
                      </Badge>
                    )}
                    {replica.text}
                  </Table.Td>
                </Table.Tr>
              ))}
            </Table.Tbody>
          </Table>
        </Table.ScrollContainer>
      )}
    </Stack>
  );
}

function RedisMemory({ redis }: { redis: Model<"RedisRow"> }) {
  const share = redis.max_bytes === null || redis.max_bytes === 0 ? null : redis.used_bytes / redis.max_bytes;
  const text =
    share === null
      ? `${formatBytes(redis.used_bytes)}, no limit`
      : `${formatBytes(redis.used_bytes)} of ${formatBytes(redis.max_bytes)} (${(100 * share).toFixed(0)} %)`;
  return (
    <div data-testid="redis">
      <Group justify="space-between">
        <Text size="sm">Memory</Text>
        <Text size="sm" className="number">
          {text}
        </Text>
      </Group>
      {share !== null && (
        <Progress
          value={100 * share}
          color={share > 0.85 ? "var(--bad)" : "var(--series-1)"}
          aria-label={`Memory of Redis: ${text}`}
          my={4}
        />
      )}
      <Text size="sm" className="quiet">
        {redis.clients} clients · when it is full: {redis.policy}
      </Text>
    </div>
  );
}

function Queues({ health }: { health: Health }) {
  return (
    <Stack component="section" gap={6} p="md" className="card" data-testid="queues">
      <Text component="h2" fw={650}>
        Redis
      </Text>
      {health.redis === null ? (
        <Text className="quiet">Redis does not answer.</Text>
      ) : (
        <RedisMemory redis={health.redis} />
      )}
      {health.queues.length > 0 && (
        <Table.ScrollContainer minWidth={280}>
          <Table>
            <Table.Thead>
              <Table.Tr>
                <Table.Th>queue</Table.Th>
                <Table.Th ta="right">entries</Table.Th>
                <Table.Th ta="right">size</Table.Th>
              </Table.Tr>
            </Table.Thead>
            <Table.Tbody>
              {health.queues.map((queue) => (
                <Table.Tr key={queue.name}>
                  <Table.Td className="mono">{queue.name}</Table.Td>
                  <Table.Td ta="right" className="number">
                    {formatNumber(queue.entries)}
                  </Table.Td>
                  <Table.Td ta="right" className="number">
                    {formatBytes(queue.bytes)}
                  </Table.Td>
                </Table.Tr>
              ))}
            </Table.Tbody>
          </Table>
        </Table.ScrollContainer>
      )}
    </Stack>
  );
}

/** The way of trajectories and policies: engines and Redis. */
export function Delivery({ health }: { health: Health }) {
  return (
    <>
      <Replicas health={health} />
      <Queues health={health} />
    </>
  );
}
