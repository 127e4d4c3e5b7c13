import { Kbd, Modal, Table } from "@mantine/core";
import { useHotkeyList } from "../ui/hotkeys";

function Keys() {
  const list = useHotkeyList();
  return (
    <Table data-testid="keys">
      <Table.Tbody>
        {list().map(({ keys, label }) => (
          <Table.Tr key={keys}>
            <Table.Td w={90}>
              {keys.split(" ").map((key) => (
                <Kbd key={key} mr={4}>
                  {key}
                </Kbd>
              ))}
            </Table.Td>
            <Table.Td>{label}</Table.Td>
          </Table.Tr>
        ))}
      </Table.Tbody>
    </Table>
  );
}

/** The keys that work where the reader is. */
export function HelpOverlay({ opened, onClose }: { opened: boolean; onClose: () => void }) {
  return (
    <Modal opened={opened} onClose={onClose} title="Keys of this page" closeButtonProps={{ "aria-label": "Close" }}>
      <Keys />
    </Modal>
  );
}
