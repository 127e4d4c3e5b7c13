import { useWindowVirtualizer } from "@tanstack/react-virtual";
import {
  memo,
  useCallback,
  useEffect,
  useEffectEvent,
  useImperativeHandle,
  useLayoutEffect,
  useRef,
  useState,
} from "react";
import type { ReactNode, Ref } from "react";
import type { Found } from "./find";
import type { TextRange } from "./gold";
import type { Row } from "./layout";
import { findRow } from "./layout";
import { Passages } from "./Passages";
import { Units } from "./Units";
import { useBox } from "./useBox";
import "./trajectory.css";

export interface ConversationHandle {
  showRow: (row: number) => void;
  /** Scrolls to a token and marks it; null marks none. */
  showToken: (token: number | null, scroll?: boolean) => void;
}

interface Props {
  rows: readonly Row[];
  /** Class of each token; empty where tokens have no colour. */
  colours: readonly string[];
  isColoured: boolean;
  found: Found;
  wanted: string;
  findGold: (text: string) => TextRange[];
  renderHead: (row: Row & { kind: "head" }) => ReactNode;
  /** The pointer is on a token, or was pressed on it; null: it left. */
  onToken: (token: number | null, isPressed: boolean) => void;
  ref?: Ref<ConversationHandle>;
}

/** Texts up to so many units are drawn whole, so that the browser finds and prints all of them. */
const WHOLE = 4000;
const OVERSCAN = 3;
const LINE = 22;
const CHARACTER = 8;

/** Everything that was said, row by row; of long trajectories only the rows in view are in the document. */
export const Conversation = memo(function Conversation({
  rows,
  colours,
  isColoured,
  found,
  wanted,
  findGold,
  renderHead,
  onToken,
  ref,
}: Props) {
  const [box, setBox] = useState<HTMLDivElement | null>(null);
  const { top, width } = useBox(box);
  const units = rows.reduce((sum, row) => sum + (row.kind === "text" ? row.units.length : 0), 0);
  const virtualizer = useWindowVirtualizer<HTMLDivElement>({
    count: rows.length,
    estimateSize: (index) => estimateHeight(rows[index], width),
    getItemKey: (index) => rows[index]?.key ?? index,
    overscan: units <= WHOLE ? rows.length : OVERSCAN,
    scrollMargin: top,
    directDomUpdates: true,
    directDomUpdatesMode: "position",
    useAnimationFrameWithResizeObserver: false,
  });
  // In an effect, since a ref that is a property makes the whole object one to the linter.
  useLayoutEffect(() => {
    virtualizer.containerRef(box);
  }, [virtualizer, box]);
  const active = useRef<number | null>(null);
  const awaited = useRef<number | null>(null);

  const markActive = useCallback(() => {
    if (box === null) return;
    const token = active.current;
    const element = token === null ? null : box.querySelector(`[data-token="${token}"]`);
    for (const old of box.querySelectorAll(".active")) if (old !== element) old.classList.remove("active");
    element?.classList.add("active");
    if (element !== null && awaited.current === token) {
      awaited.current = null;
      if (!isInView(element)) element.scrollIntoView({ block: "center" });
    }
  }, [box]);
  // Rows come and go while scrolling, and React writes classes anew with the colours.
  useLayoutEffect(markActive);

  useImperativeHandle(ref, () => ({
    showRow: (row) => {
      virtualizer.scrollToIndex(row, { align: "center" });
    },
    showToken: (token, scroll = false) => {
      active.current = token;
      awaited.current = scroll ? token : null;
      const isDrawn = token !== null && box?.querySelector(`[data-token="${token}"]`);
      if (scroll && token !== null && !isDrawn) {
        const row = findRow(rows, token);
        if (row >= 0) virtualizer.scrollToIndex(row, { align: "center" });
      }
      markActive();
    },
  }));

  const readToken = useEffectEvent((event: Event, isPressed: boolean) => {
    const element = event.target instanceof Element ? event.target.closest("[data-token]") : null;
    if (element === null) {
      if (!isPressed) onToken(null, false);
      return;
    }
    onToken(Number(element.getAttribute("data-token")), isPressed);
  });
  useEffect(() => {
    if (box === null) return undefined;
    const over = (event: PointerEvent) => {
      if (event.pointerType === "mouse") readToken(event, false);
    };
    const press = (event: Event) => {
      // Not at the end of a selection of text, which somebody wants to copy.
      if (window.getSelection()?.isCollapsed !== false) readToken(event, true);
    };
    const leave = () => {
      onToken(null, false);
    };
    box.addEventListener("pointerover", over);
    box.addEventListener("pointerleave", leave);
    box.addEventListener("click", press);
    return () => {
      box.removeEventListener("pointerover", over);
      box.removeEventListener("pointerleave", leave);
      box.removeEventListener("click", press);
    };
  }, [box, onToken]);

  return (
    <div
      ref={setBox}
      className={`conversation ${isColoured ? "coloured" : ""}`}
      data-testid="conversation"
      role="group"
      aria-label="Conversation"
    >
      {virtualizer.getVirtualItems().map(({ index, key }) => {
        const row = rows[index];
        if (row === undefined) return null;
        return (
          <div
            key={key}
            ref={virtualizer.measureElement}
            data-index={index}
            data-kind={row.kind}
            data-author={readAuthor(row)}
            className="conversation-row"
          >
            <RowContent
              row={row}
              colours={colours}
              ranges={found.ranges.get(index)}
              {...{ wanted, findGold, renderHead }}
            />
          </div>
        );
      })}
    </div>
  );
});

interface RowProps extends Pick<Props, "colours" | "wanted" | "findGold" | "renderHead"> {
  row: Row;
  ranges: readonly TextRange[] | undefined;
}

const RowContent = memo(function RowContent({ row, colours, ranges, wanted, findGold, renderHead }: RowProps) {
  switch (row.kind) {
    case "prompt":
      return (
        <details>
          <summary className="quiet">Prompt</summary>
          <div className="units quiet">{row.text}</div>
        </details>
      );
    case "head":
      return renderHead(row);
    case "text":
      return <Units units={row.units} colours={colours} {...(ranges !== undefined && { found: ranges })} />;
    case "passages":
      return <Passages passages={row.turn.passages} findGold={findGold} wanted={wanted} />;
  }
});

function readAuthor(row: Row): string | undefined {
  if (row.kind === "text") return row.author;
  if (row.kind === "head") return row.block.author;
  return row.kind === "passages" ? "env" : undefined;
}

function estimateHeight(row: Row | undefined, width: number): number {
  if (row === undefined) return 0;
  switch (row.kind) {
    case "prompt":
      return LINE;
    case "head":
      return 44;
    case "passages":
      return row.turn.passages.reduce(
        (sum, { text }) => sum + 56 + LINE * Math.ceil((text.length * CHARACTER) / width),
        0,
      );
    case "text": {
      let lines = 1;
      let line = 0;
      for (const { text, shown } of row.units) {
        line += (shown.end - shown.begin) * CHARACTER;
        if (line > width || text.slice(shown.begin, shown.end).includes("\n")) {
          lines += 1;
          line = 0;
        }
      }
      return lines * LINE;
    }
  }
}

/** Whether an element is between the toolbar and the end of the window. */
function isInView(element: Element): boolean {
  const { top, bottom } = element.getBoundingClientRect();
  return top > 150 && bottom < window.innerHeight - 20;
}
