import { Anchor, Badge, Button, Group, Loader, Stack, Text } from "@mantine/core";
import { Link } from "react-router";
import { Score, formatNumber } from "../ui/format";
import type { Exchange } from "./exchanges";
import type { AskEvent } from "./stream";
import { TaggedText } from "./TaggedText";

function Passages({ event }: { event: AskEvent }) {
  const passages = event.turn?.passages ?? [];
  if (passages.length === 0) return <TaggedText text={event.text} />;
  return (
    <ol className="passages">
      {passages.map((passage, index) => (
        <li key={`${passage.id} ${index}`}>
          <Text span size="sm" fw={600}>
            {passage.title}
          </Text>{" "}
          <Text span size="xs" className="quiet">
            {passage.id} · score {formatNumber(passage.score, 3)}
          </Text>
          <Text size="sm" className="passage-text">
            {passage.text}
          </Text>
        </li>
      ))}
    </ol>
  );
}

function Event({ event }: { event: AskEvent }) {
  const isPolicy = event.kind === "turn";
  const turn = event.turn === null ? "" : `turn ${event.turn.index} · `;
  return (
    <div className={isPolicy ? "written written-model" : "written written-env"} data-testid={`ask-${event.kind}`}>
      <Text size="xs" className="quiet written-author">
        {turn}
        {isPolicy ? "policy" : (event.turn?.passages.length ?? 0) > 0 ? "retrieved" : "environment"}
        {!isPolicy && event.turn?.retrieval_status != null && event.turn.retrieval_status !== "OK" && (
          <> · {event.turn.retrieval_status}</>
        )}
      </Text>
      {isPolicy ? <TaggedText text={event.text} /> : <Passages event={event} />}
    </div>
  );
}

function Ending({ exchange }: { exchange: Exchange }) {
  const end = exchange.events.findLast((event) => event.kind === "end");
  if (exchange.state === "asking") {
    return (
      <Group gap="xs">
        <Loader size="xs" />
        <Text size="sm" className="quiet">
          The policy is answering …
        </Text>
      </Group>
    );
  }
  if (exchange.state === "failed") {
    return (
      <Text size="sm" role="alert" c="var(--bad)" data-testid="ask-failed">
        {exchange.error}
      </Text>
    );
  }
  if (exchange.state === "stopped") {
    return (
      <Text size="sm" className="quiet" data-testid="ask-stopped">
        Stopped.
      </Text>
    );
  }
  const judgement = end?.judgement ?? null;
  return (
    <Group gap="md" data-testid="ask-end">
      {end?.answer == null ? (
        <Text fw={600}>No answer: the policy ended without one.</Text>
      ) : (
        <Text fw={650} style={{ overflowWrap: "anywhere" }}>
          Answer: {end.answer}
        </Text>
      )}
      {judgement?.total != null && (
        <Text size="sm" className="quiet">
          reward {judgement.reward} <Score value={judgement.total} />
        </Text>
      )}
    </Group>
  );
}

/** One question with its answer, as it comes. */
export function Answer({ exchange, onAgain }: { exchange: Exchange; onAgain: () => void }) {
  const { request, version } = exchange;
  return (
    <Stack component="article" gap="xs" p="md" className="card" data-testid="exchange" data-state={exchange.state}>
      <Group justify="space-between" align="flex-start" wrap="nowrap">
        <Text fw={600} style={{ overflowWrap: "anywhere" }}>
          {request.question}
        </Text>
        <Button variant="subtle" size="compact-xs" onClick={onAgain} flex="none">
          Ask again
        </Button>
      </Group>
      <Group gap={6}>
        {version !== null && <Badge variant="default">version {version}</Badge>}
        {request.environment !== "" && <Badge variant="default">{request.environment}</Badge>}
        <Badge variant="default">temperature {request.temperature}</Badge>
      </Group>
      <div aria-live="polite" className="ask-events">
        {exchange.events
          .filter((event) => event.kind !== "end")
          .map((event, index) => (
            <Event key={index} event={event} />
          ))}
        <Ending exchange={exchange} />
      </div>
    </Stack>
  );
}

export function NotReady({ problem, healthPath }: { problem: string | null; healthPath: string }) {
  return (
    <Stack gap={4} p="md" className="card" data-testid="ask-not-ready">
      <Text fw={600}>The policy of this run cannot be asked now</Text>
      <Text size="sm" className="quiet">
        {problem ?? "Its services do not answer."}
      </Text>
      <Anchor component={Link} to={healthPath} size="sm">
        What the services do
      </Anchor>
    </Stack>
  );
}
