import { useHotkeys } from "../ui/hotkeys";
import { findMode, isAvailable, listSwatches, MODES, type ModeId, type Scale, type Tokens } from "./colours";

interface PickerProps {
  mode: ModeId;
  tokens: Tokens | null;
  stepVersion: number | null;
  onMode: (mode: ModeId) => void;
}

/** Chooses what colours mean; keys 1 to 0 do the same. */
export function ModePicker({ mode, tokens, stepVersion, onMode }: PickerProps) {
  const modes = MODES.map((one) => ({ ...one, isOff: !isAvailable(one, tokens, stepVersion) }));
  useHotkeys(
    modes
      .filter(({ isOff }) => !isOff)
      .map(({ id, key, label }) => ({
        keys: key,
        label: `Colours: ${label}`,
        run: () => {
          onMode(id);
        },
      })),
  );
  return (
    <fieldset className="modes" aria-label="Colour by">
      {modes.map(({ id, label, key, meaning, missing, isOff }) => (
        <label
          key={id}
          className="mode"
          title={isOff ? `Not available: ${tokens === null ? "validations keep no tokens" : missing}` : meaning}
        >
          <input
            type="radio"
            name="colour"
            value={id}
            checked={mode === id}
            disabled={isOff}
            onChange={() => {
              onMode(id);
            }}
          />
          {label}
          <kbd aria-hidden="true">{key}</kbd>
        </label>
      ))}
    </fieldset>
  );
}

/** What the colours of a mode mean, with its scale. */
export function Legend({ mode, scale }: { mode: ModeId; scale: Scale }) {
  const { meaning, kind } = findMode(mode);
  if (kind === "author") {
    return (
      <div className="legend quiet" data-testid="legend">
        <span style={{ color: "var(--author-model)" }}>▍policy</span>
        <span style={{ color: "var(--author-env)" }}>▍environment</span>
        <span>
          <span className="gold">underlined</span>: accepted answer
        </span>
      </div>
    );
  }
  return (
    <div className="legend coloured" data-kind="scale" data-testid="legend">
      <span className="legend-scale">
        {listSwatches(scale).map(({ className, label }) => (
          <span key={className} className={`swatch ${className}`}>
            {label}
          </span>
        ))}
      </span>
      <span className="quiet">
        {meaning}
        {kind === "diverging" && scale.high === 0 && scale.count > 0 && "; 0 at every token"}
        {scale.beyond > 0 && `; ${scale.beyond} of ${scale.count} tokens lie beyond the scale`}
      </span>
    </div>
  );
}
