import { Badge, Text } from "@mantine/core";
import type { Model } from "../api/client";
import { formatNumber } from "../ui/format";
import { findText, type TextRange } from "./gold";
import { Marked } from "./Marked";

interface Props {
  passages: readonly Model<"Passage">[];
  findGold: (text: string) => TextRange[];
  /** Looked for by the reader. */
  wanted?: string;
}

/** Retrieved passages in order of rank: title, score, document id, text with accepted answers marked. */
export function Passages({ passages, findGold, wanted = "" }: Props) {
  return (
    <div role="list" aria-label="Passages">
      {passages.map(({ id, title, text, score, gold }, rank) => (
        <div key={rank} role="listitem" className="passage" data-testid="passage" data-gold={gold}>
          <Text component="div" size="sm">
            <b>
              <Marked text={title} gold={findGold(title)} found={findText(title, wanted)} />
            </b>{" "}
            <span className="quiet number">
              {rank + 1}. · score {formatNumber(score, 3)} · <span className="mono">{id}</span>
            </span>{" "}
            {gold && (
              <Badge size="sm" style={{ color: "var(--good)", background: "var(--good-shade)" }}>
                has the answer
              </Badge>
            )}
          </Text>
          <p>
            <Marked text={text} gold={findGold(text)} found={findText(text, wanted)} />
          </p>
        </div>
      ))}
    </div>
  );
}
