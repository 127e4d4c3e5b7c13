import { Button, Group, Stack, Text } from "@mantine/core";
import { useMemo } from "react";
import { api, type Model } from "../api/client";
import { describeError } from "../api/errors";
import { diffTexts } from "../questions/diff";
import { formatNumber } from "../ui/format";
import type { Detail } from "./layout";
import { TextChanges } from "./TextChanges";

type Result = Model<"ReplayResult">;

/** Scores the same text again, or samples the same prompt again, and compares. */
export function Replay({ run, detail }: { run: string; detail: Detail }) {
  const { place, row } = detail.summary;
  const replay = api.useMutation("post", "/api/runs/{run}/trajectories/{place}/{row}/replay");
  const start = (kind: "score" | "sample") => () => {
    replay.mutate({ params: { path: { run, place, row } }, body: { kind } });
  };
  const kind = replay.variables?.body.kind;
  return (
    <section aria-label="Replay" data-testid="replay">
      <h2>Replay</h2>
      <Group gap="xs">
        <Button
          variant="default"
          size="compact-sm"
          loading={replay.isPending && kind === "score"}
          disabled={replay.isPending}
          onClick={start("score")}
          title="The same text, by the reward service that runs now"
        >
          Score again
        </Button>
        <Button
          variant="default"
          size="compact-sm"
          loading={replay.isPending && kind === "sample"}
          disabled={replay.isPending}
          onClick={start("sample")}
          title="The same prompt and seed, by the policy that is served now"
        >
          Sample again
        </Button>
      </Group>
      {replay.error !== null && (
        <p className="hint bad" role="alert">
          {describeError(replay.error)}
        </p>
      )}
      {replay.data !== undefined && <Comparison result={replay.data} detail={detail} />}
    </section>
  );
}

function Comparison({ result, detail }: { result: Result; detail: Detail }) {
  const { stored, new: now, changed, divergence, version, kind, blocks } = result;
  const before = new Map(stored.components.map((component) => [component.name, component.weighted]));
  const diff = useMemo(
    () => (divergence === "" ? null : diffTexts(withoutPrompt(detail.blocks), withoutPrompt(blocks))),
    [detail, blocks, divergence],
  );
  return (
    <Stack gap={4} mt={8} data-testid="replay-result">
      <Text size="sm">
        {kind === "sample" && (version === null ? "Sampled again: " : `Sampled again by version ${version}: `)}
        reward <b className="number">{formatNumber(stored.total)}</b> →{" "}
        <b className="number">{formatNumber(now.total)}</b>
        {stored.total === now.total && ", unchanged"}
        {stored.status !== now.status && ` (${stored.status} → ${now.status})`}
      </Text>
      {changed.map(({ name, weighted }) => (
        <Text size="sm" key={name}>
          {name}: <span className="number">{formatNumber(before.get(name))}</span> →{" "}
          <span className="number">{formatNumber(weighted)}</span>
        </Text>
      ))}
      {now.detail !== "" && now.detail !== stored.detail && (
        <Text size="sm" className="quiet">
          {now.detail}
        </Text>
      )}
      {kind === "sample" && (
        <Text size="sm">
          {divergence === ""
            ? "Token for token the same text."
            : `The texts diverge at ${divergence}${result.is_repeatable ? "." : "; it was sampled without a seed, so it need not repeat."}`}
        </Text>
      )}
      {diff !== null && <TextChanges parts={diff.unified} isWhole={diff.isWhole} />}
    </Stack>
  );
}

export function withoutPrompt<Block extends { author: string }>(blocks: readonly Block[]): Block[] {
  return blocks.filter(({ author }) => author !== "prompt");
}
