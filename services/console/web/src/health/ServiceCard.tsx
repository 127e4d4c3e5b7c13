import { Badge, Group, Stack, Text } from "@mantine/core";
import type { Model } from "../api/client";
import { formatDuration } from "../ui/format";
import { describeLimit, isUrgent, orderWaits, toneOf } from "./waits";

function WaitLine({ wait, elapsed }: { wait: Model<"WaitRow">; elapsed: number }) {
  const urgent = isUrgent(wait, elapsed);
  return (
    <li className={wait.is_idle ? "quiet" : undefined} data-testid="wait" data-urgent={urgent || undefined}>
      {wait.is_idle ? "waits for work" : "waits"}: {wait.what}
      {wait.on !== "" && <> from {wait.on}</>}
      {wait.count > 1 && <> ({wait.count} times)</>}
      {wait.detail !== "" && <> – {wait.detail}</>}
      <span className="wait-limit" data-urgent={urgent || undefined}>
        {" "}
        since {formatDuration(Math.floor(wait.waited_s + elapsed))}, {describeLimit(wait, elapsed)}
      </span>
    </li>
  );
}

interface Props {
  service: Model<"ServiceRow">;
  /** Seconds since the state was read. */
  elapsed: number;
  isOver: boolean;
}

/** One service: its state, what it waits for, what it says about itself, its last lines. */
export function ServiceCard({ service, elapsed, isOver }: Props) {
  const tone = toneOf(service.state, isOver);
  const missing = Object.entries(service.waiting_for);
  return (
    <Stack component="section" gap={6} p="md" className="card" data-testid="service" data-service={service.name}>
      <Group justify="space-between" gap="xs">
        <Text component="h2" fw={650}>
          {service.name}
        </Text>
        <Group gap={6}>
          {service.restarts > 0 && (
            <Badge variant="default">
              {service.restarts} {service.restarts === 1 ? "restart" : "restarts"}
            </Badge>
          )}
          <Badge variant="default" className={`tone tone-${tone}`} data-state={service.state}>
            {service.state}
          </Badge>
        </Group>
      </Group>
      <Text className="mono quiet">{service.address}</Text>
      {(missing.length > 0 || service.notes.length > 0 || service.waits.length > 0) && (
        <ul className="health-list">
          {missing.map(([name, why]) => (
            <li key={name}>
              not ready: {name}
              {why !== "" && <> – {why}</>}
            </li>
          ))}
          {orderWaits(service.waits).map((wait, index) => (
            <WaitLine key={`${wait.what} ${index}`} wait={wait} elapsed={elapsed} />
          ))}
          {service.notes.map((note, index) => (
            <li key={index}>{note}</li>
          ))}
        </ul>
      )}
      {service.log.length > 0 && (
        <details>
          <summary>
            Last {service.log.length === 1 ? "line" : `${service.log.length} lines`} of {service.name}.log
          </summary>
          {/* A region that scrolls takes the focus, so that the keyboard can scroll it. */}
          <pre className="log" tabIndex={0} role="region" aria-label={`Log of ${service.name}`}>
            {service.log.join("\n")}
          </pre>
        </details>
      )}
    </Stack>
  );
}
