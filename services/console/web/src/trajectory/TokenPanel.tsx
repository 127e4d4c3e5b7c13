import { ActionIcon, Group } from "@mantine/core";
import { formatNumber, UNKNOWN } from "../ui/format";
import type { Tokens } from "./colours";
import { formatSigned } from "./credit";

interface Props {
  tokens: Tokens;
  token: number | null;
  stepVersion: number | null;
  isPinned: boolean;
  onClose: () => void;
}

const SIGNS: Record<string, string> = { "\n": "↵", "\t": "⇥", "\r": "␍" };

/** Makes spaces and line breaks of a token visible. */
export function showToken(text: string): string {
  return text === "" ? "(no text)" : text.replace(/[\n\t\r]/g, (sign) => SIGNS[sign] ?? sign).replaceAll(" ", "␣");
}

export interface Fact {
  name: string;
  value: string;
}

/** Everything that is known of a token. */
export function listFacts(tokens: Tokens, token: number, stepVersion: number | null): Fact[] {
  const at = (column: readonly (number | null)[] | null) => column?.[token] ?? null;
  const version = at(tokens.version);
  const logProb = at(tokens.log_prob);
  const turn = at(tokens.turn);
  const plain = (value: number | null) => formatNumber(value, 5);
  return [
    { name: "token", value: `${token} of ${tokens.text.length}` },
    { name: "id", value: String(tokens.id[token] ?? UNKNOWN) },
    { name: "author", value: turn === null ? "environment" : `policy, turn ${turn}` },
    { name: "trained on", value: tokens.mask[token] === 1 ? "yes" : "no" },
    { name: "advantage", value: formatSigned(at(tokens.advantage), 5) },
    { name: "return", value: formatSigned(at(tokens.returns), 5) },
    { name: "reward", value: formatSigned(at(tokens.reward), 5) },
    { name: "critic's value", value: plain(at(tokens.value)) },
    {
      name: "policy version",
      value:
        version === null
          ? UNKNOWN
          : stepVersion === null
            ? String(version)
            : `${version}, staleness ${stepVersion - version}`,
    },
    { name: "log-prob, trainer", value: plain(logProb) },
    { name: "probability", value: logProb === null ? UNKNOWN : `${formatNumber(100 * Math.exp(logProb), 4)} %` },
    { name: "log-prob, engine", value: plain(at(tokens.engine_log_prob)) },
    { name: "mismatch", value: formatSigned(at(tokens.mismatch), 3) },
    { name: "log-prob, reference", value: plain(at(tokens.reference_log_prob)) },
    { name: "KL", value: plain(at(tokens.kl)) },
    { name: "entropy", value: plain(at(tokens.entropy)) },
  ];
}

/** All numbers of the token under the pointer, or of the one that was chosen. */
export function TokenPanel({ tokens, token, stepVersion, isPinned, onClose }: Props) {
  return (
    <section
      className="panel card"
      aria-label="Token"
      aria-live="polite"
      data-testid="token-panel"
      data-pinned={isPinned && token !== null}
    >
      <Group justify="space-between" wrap="nowrap">
        <h2>Token</h2>
        {isPinned && token !== null && (
          <ActionIcon variant="subtle" size="sm" onClick={onClose} aria-label="Let go of the token (Esc)">
            ✕
          </ActionIcon>
        )}
      </Group>
      {token === null ? (
        <p className="quiet hint">
          Point at a token, press it to keep it, or walk with h and l: all its numbers are here.
        </p>
      ) : (
        <>
          <p className="hint">
            <span className="token" data-testid="token-text">
              {showToken(tokens.text[token] ?? "")}
            </span>
          </p>
          <dl className="facts">
            {listFacts(tokens, token, stepVersion).map(({ name, value }) => (
              <div key={name}>
                <dt>{name}</dt>
                <dd data-fact={name}>{value}</dd>
              </div>
            ))}
          </dl>
        </>
      )}
    </section>
  );
}
