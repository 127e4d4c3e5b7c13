/** Splits a text at its tags: texts at even places, tags at odd ones. */
function splitTags(text: string): string[] {
  return text.split(/(<\/?[A-Za-z_][\w-]*>)/);
}

/** A text of a model or an environment, with its tags set back. */
export function TaggedText({ text }: { text: string }) {
  return (
    <span>
      {splitTags(text).map((part, index) =>
        index % 2 === 1 ? (
          <span key={index} className="written-tag">
            {part}
          </span>
        ) : (
          part
        ),
      )}
    </span>
  );
}
