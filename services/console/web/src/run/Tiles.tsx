import { SimpleGrid } from "@mantine/core";
import type { ReactNode } from "react";
import type { Model } from "../api/client";
import { formatNumber, formatScore, Score } from "../ui/format";

function Tile({ label, hint, children }: { label: string; hint?: string | undefined; children: ReactNode }) {
  return (
    <div className="card run-tile">
      <dt className="quiet" title={hint}>
        {label}
      </dt>
      <dd className="number">{children}</dd>
    </div>
  );
}

/** The numbers that a reader looks for first, as of the last step. */
export function Tiles({ detail }: { detail: Model<"RunDetail"> }) {
  const { run, now } = detail;
  const read = (name: string) => now[name] ?? null;
  const best = run.best_em;
  return (
    <SimpleGrid component="dl" cols={{ base: 2, xs: 3, lg: 6 }} spacing="xs" m={0} data-testid="tiles">
      <Tile
        label="EM, greedy"
        hint={best === null ? "of the last validation" : `best: ${formatScore(best.mean)} (${run.best_label ?? ""})`}
      >
        <Score value={run.em?.mean} low={run.em?.low} high={run.em?.high} />
      </Tile>
      <Tile label="EM, sampled" hint="of the answers of the last step, which are sampled to be trained on">
        {formatScore(read("em_mean"))}
      </Tile>
      <Tile label="reward">{formatNumber(read("reward_mean"), 3)}</Tile>
      <Tile label="search rate" hint="share of trajectories that search">
        {formatScore(read("search_rate"))}
      </Tile>
      <Tile label="staleness" hint="versions by which the policy of a token was older than the one it trains">
        {formatNumber(read("staleness_mean"), 3)}
      </Tile>
      <Tile label="tokens/s">{formatNumber(read("tokens_per_s"), 3)}</Tile>
    </SimpleGrid>
  );
}
