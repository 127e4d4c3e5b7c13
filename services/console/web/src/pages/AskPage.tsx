import { Button, Group, NumberInput, Select, Stack, Text, Textarea } from "@mantine/core";
import { useRef, useState, type KeyboardEvent } from "react";
import { useParams } from "react-router";
import { api, type Model } from "../api/client";
import { paths } from "../app/paths";
import { Answer, NotReady } from "../ask/Answer";
import "../ask/ask.css";
import { useExchanges } from "../ask/exchanges";
import { useHotkeys } from "../ui/hotkeys";
import { Page } from "../ui/Page";
import { asNumber, asText, useSearchParam } from "../ui/searchParams";
import { EmptyState, QueryState } from "../ui/states";

const POLL_MS = 5_000;

function AskForm({ run, status }: { run: string; status: Model<"AskStatus"> }) {
  const { exchanges, begin, stop, forget } = useExchanges(run);
  const [asked, setAsked] = useSearchParam("question", asText, "");
  const [question, setQuestion] = useState(asked);
  const [environment, setEnvironment] = useSearchParam("environment", asText, "");
  const [temperature, setTemperature] = useSearchParam("temperature", asNumber, 0);
  const field = useRef<HTMLTextAreaElement>(null);
  const isAsking = exchanges[0]?.state === "asking";
  const canAsk = status.is_ready && question.trim() !== "";

  const submit = () => {
    if (!canAsk || isAsking) return;
    setAsked(question.trim());
    void begin({ question: question.trim(), temperature, environment });
  };
  useHotkeys([
    { keys: "/", label: "Write a question", run: () => field.current?.focus() },
    { keys: "Escape", label: "Stop the answer", run: stop },
  ]);
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.nativeEvent.isComposing) {
      event.preventDefault();
      submit();
    }
    if (event.key === "Escape") field.current?.blur();
  };

  return (
    <Stack gap="md">
      {!status.is_ready && <NotReady problem={status.problem} healthPath={paths.health(run)} />}
      <form
        onSubmit={(event) => {
          event.preventDefault();
          submit();
        }}
      >
        <Stack gap="xs">
          <Textarea
            ref={field}
            label="Question"
            description="Enter asks, Shift+Enter begins a new line."
            autosize
            minRows={2}
            maxRows={8}
            maxLength={4000}
            value={question}
            onChange={(event) => {
              setQuestion(event.currentTarget.value);
            }}
            onKeyDown={onKeyDown}
            data-testid="ask-question"
          />
          <Group gap="sm" align="flex-end">
            <Select
              label="Environment"
              w={200}
              data={[{ value: "", label: "As in training" }, ...status.environments]}
              value={environment}
              allowDeselect={false}
              onChange={(value) => {
                setEnvironment(value ?? "");
              }}
            />
            <NumberInput
              label="Temperature"
              w={110}
              min={0}
              max={2}
              step={0.1}
              decimalScale={2}
              clampBehavior="strict"
              value={temperature}
              onChange={(value) => {
                if (typeof value === "number") setTemperature(value);
              }}
            />
            {isAsking ? (
              <Button variant="default" onClick={stop} data-testid="ask-stop">
                Stop
              </Button>
            ) : (
              <Button type="submit" disabled={!canAsk} data-testid="ask-submit">
                Ask
              </Button>
            )}
            {status.version !== null && (
              <Text size="sm" className="quiet" pb={8} data-testid="ask-version">
                Version {status.version} is served.
              </Text>
            )}
          </Group>
        </Stack>
      </form>
      {exchanges.length === 0 ? (
        status.is_ready && (
          <EmptyState title="Nothing asked yet">
            Ask anything: you see each turn of the policy and what it finds as it comes. Nothing of it is trained on.
          </EmptyState>
        )
      ) : (
        <>
          <Group justify="space-between">
            <Text component="h2" fw={600}>
              Asked in this session
            </Text>
            <Button variant="subtle" size="compact-sm" onClick={forget}>
              Forget
            </Button>
          </Group>
          {exchanges.map((exchange) => (
            <Answer
              key={exchange.id}
              exchange={exchange}
              onAgain={() => {
                setQuestion(exchange.request.question);
                setEnvironment(exchange.request.environment);
                setTemperature(exchange.request.temperature);
                field.current?.focus();
              }}
            />
          ))}
        </>
      )}
    </Stack>
  );
}

export default function AskPage() {
  const { run = "" } = useParams();
  const status = api.useQuery(
    "get",
    "/api/runs/{run}/ask",
    { params: { path: { run } } },
    { refetchInterval: POLL_MS, staleTime: 0 },
  );
  return (
    <Page title="Ask" crumbs={[{ label: run, to: paths.run(run) }]}>
      <QueryState query={status}>{(data) => <AskForm key={run} run={run} status={data} />}</QueryState>
    </Page>
  );
}
