"""What the device says of itself: the name and the limits of a card."""

from dataclasses import dataclass
from types import SimpleNamespace

MEMORY = 24 << 30  # bytes that it says it has


@dataclass(frozen=True)
class Card:
    """What the device says of itself. By default it has the compute capability and limits of an H100."""

    name: str = "simulated device"
    capability: tuple[int, int] = (9, 0)
    shared_memory: int = 227 << 10  # bytes, the most that a block of a kernel may have
    threads: int = 2048  # of a multiprocessor

    def properties(self) -> SimpleNamespace:
        """Returns torch.cuda.get_device_properties of it."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name,
            major=major,
            minor=minor,
            multi_processor_count=82,
            total_memory=MEMORY,
            warp_size=32,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=self.threads,
            max_threads_per_block=1024,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=self.shared_memory,
            shared_memory_per_multiprocessor=self.shared_memory + 1024,
            L2_cache_size=6 << 20,
            clock_rate=1_695_000,  # kHz, as the next one; inductor computes ridge points from them
            memory_clock_rate=9_751_000,
            memory_bus_width=384,
            gcnArchName="",
            pci_bus_id=0,
            uuid="0",
        )
