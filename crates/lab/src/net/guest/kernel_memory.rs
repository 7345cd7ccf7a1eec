//! The memory of a guest's kernel, found and overwritten: it shows the kernel's behaviour after four billion
//! packets without sending them.
//!
//! The bytes are found in /proc/kcore, where no program may write. QEMU's device `edu` writes instead: it
//! copies between its 4 KiB and any place in the guest's memory (QEMU's docs/specs/edu.rst).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use weft_io::registers::Registers;

const PAGE_BYTES: u64 = 4096;
/// Bytes of one read.
const CHUNK_BYTES: u64 = 1 << 20;
/// Flag of /proc/kpageflags: the page holds kernel objects.
const SLAB_BIT: u64 = 1 << 7;
/// Flag of /proc/self/pagemap: the page is in memory. The frame bits say where.
const PRESENT_BIT: u64 = 1 << 63;
const FRAME_BITS: u64 = (1 << 55) - 1;
/// In an ELF program header: a part of memory whose physical address the kernel does not give.
const NO_PLACE: u64 = u64::MAX;
/// Start of the kernel's text and modules; the rest of its memory is lower.
const KERNEL_TEXT: u64 = 0xffff_ffff_8000_0000;

/// The memory of the guest's kernel.
#[derive(Debug)]
pub struct KernelMemory {
    core: File,
    parts: Vec<Part>,
    copier: Copier,
}

/// A part of memory, and where /proc/kcore has it.
#[derive(Debug)]
struct Part {
    at: u64,
    bytes: u64,
    offset: u64,
}

impl KernelMemory {
    /// That of the guest which this program runs in.
    ///
    /// # Errors
    /// This is not a guest of the VM lab.
    pub fn open() -> anyhow::Result<Self> {
        let core = File::open("/proc/kcore").context("cannot open /proc/kcore")?;
        let parts = parts(&core)?;
        anyhow::ensure!(!parts.is_empty(), "/proc/kcore does not tell where memory is");
        Ok(Self { core, parts, copier: Copier::open()? })
    }

    /// The places of these bytes among the kernel's objects.
    ///
    /// # Errors
    /// The kernel does not give its memory.
    pub fn find(&self, bytes: &[u8]) -> anyhow::Result<Vec<u64>> {
        let flags = File::open("/proc/kpageflags").context("cannot open /proc/kpageflags")?;
        let mut found = Vec::new();
        for part in &self.parts {
            for run in slab_runs(&flags, part)? {
                let text = self.read(run.0, run.1)?;
                let finder = memchr::memmem::find_iter(&text, bytes);
                found.extend(finder.map(|at| run.0 + at as u64));
            }
        }
        Ok(found)
    }

    /// Reads bytes at an address.
    ///
    /// # Errors
    /// There is no memory, or the kernel does not give it.
    pub fn read(&self, at: u64, bytes: u64) -> anyhow::Result<Vec<u8>> {
        let is_in = |part: &&Part| at >= part.at && at + bytes <= part.at + part.bytes;
        let part = self.parts.iter().find(is_in).context("no memory there")?;
        let mut text = vec![0; usize::try_from(bytes)?];
        self.core.read_exact_at(&mut text, part.offset + (at - part.at))?;
        Ok(text)
    }

    /// Overwrites bytes within a page. Their owner may use and change them at once: only a caller that knows
    /// their use can check them afterwards.
    ///
    /// # Errors
    /// The device does not copy.
    pub fn write(&self, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        self.copier.copy(bytes, at)
    }
}

/// The parts that an ELF file's program headers (elf(5)) give a place in memory.
fn parts(core: &File) -> anyhow::Result<Vec<Part>> {
    const HEADER_BYTES: usize = 64;
    const PROGRAM_HEADER_BYTES: usize = 56;
    const LOADED: u64 = 1;
    let word = |text: &[u8], at: usize| -> anyhow::Result<u64> {
        Ok(u64::from_le_bytes(text.get(at..at + 8).context("cut short")?.try_into()?))
    };
    let mut header = [0; HEADER_BYTES];
    core.read_exact_at(&mut header, 0)?;
    let (first, count) = (word(&header, 32)?, word(&header, 56)? & 0xffff);
    let mut parts = Vec::new();
    for number in 0..count {
        let mut text = [0; PROGRAM_HEADER_BYTES];
        core.read_exact_at(&mut text, first + number * PROGRAM_HEADER_BYTES as u64)?;
        let is_loaded = word(&text, 0)? & 0xffff_ffff == LOADED;
        let (address, at) = (word(&text, 16)?, word(&text, 24)?);
        if is_loaded && at != NO_PLACE && address < KERNEL_TEXT {
            parts.push(Part { at, bytes: word(&text, 32)?, offset: word(&text, 8)? });
        }
    }
    Ok(parts)
}

/// The runs of pages of the kernel's objects in a part: offset and bytes.
fn slab_runs(flags: &File, part: &Part) -> anyhow::Result<Vec<(u64, u64)>> {
    let mut all = vec![0; usize::try_from(part.bytes / PAGE_BYTES * 8)?];
    flags.read_exact_at(&mut all, part.at / PAGE_BYTES * 8)?;
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (number, page) in (0..).zip(all.as_chunks().0) {
        if u64::from_ne_bytes(*page) & SLAB_BIT == 0 {
            continue;
        }
        let at = part.at + number * PAGE_BYTES;
        match runs.last_mut() {
            Some((first, bytes)) if *first + *bytes == at && *bytes < CHUNK_BYTES => {
                *bytes += PAGE_BYTES;
            }
            _ => runs.push((at, PAGE_BYTES)),
        }
    }
    Ok(runs)
}

/// The device that copies.
#[derive(Debug)]
struct Copier {
    registers: Registers,
}

impl Copier {
    const ID: [&str; 2] = ["0x1234", "0x11e8"];
    const REGISTERS_BYTES: usize = 0x1000;
    const FROM: usize = 0x80;
    const TO: usize = 0x88;
    const BYTES: usize = 0x90;
    const COMMAND: usize = 0x98;
    const RUN: u64 = 1;
    const TO_MEMORY: u64 = 2;
    /// The address of the device's memory in its copy commands.
    const OWN: u64 = 0x4_0000;
    /// A copy takes a tenth of a second.
    const LIMIT: Duration = Duration::from_secs(20);

    fn open() -> anyhow::Result<Self> {
        let place = Self::place()?;
        // Its registers answer, and it may reach memory (PCI's command register).
        let config = File::options().read(true).write(true).open(place.join("config"))?;
        let mut command = [0; 2];
        config.read_exact_at(&mut command, 4)?;
        command[0] |= 0b110;
        config.write_all_at(&command, 4)?;
        let registers = Registers::open(&place.join("resource0"), Self::REGISTERS_BYTES);
        Ok(Self { registers: registers.context("no registers of the device edu")? })
    }

    fn place() -> anyhow::Result<PathBuf> {
        for entry in std::fs::read_dir("/sys/bus/pci/devices").context("no PCI here")? {
            let place = entry?.path();
            let id = |name| std::fs::read_to_string(place.join(name)).unwrap_or_default();
            if [id("vendor").trim(), id("device").trim()] == Self::ID {
                return Ok(place);
            }
        }
        bail!("no device edu: this is not a guest of the VM lab")
    }

    fn copy(&self, bytes: &[u8], to: u64) -> anyhow::Result<()> {
        // A buffer within one page, whose physical address the kernel gives.
        let room = usize::try_from(PAGE_BYTES)?;
        anyhow::ensure!(bytes.len() <= room, "more than a page");
        let mut pages = vec![0_u8; 2 * room];
        let start = pages.as_ptr().align_offset(room);
        pages[start..start + bytes.len()].copy_from_slice(bytes);
        let page = std::hint::black_box(&pages)[start..].as_ptr().addr();
        let mut entry = [0; 8];
        File::open(Path::new("/proc/self/pagemap"))?
            .read_exact_at(&mut entry, (page / room * 8) as u64)?;
        let entry = u64::from_ne_bytes(entry);
        anyhow::ensure!(entry & PRESENT_BIT != 0, "a page of this program is not in memory");
        self.run((entry & FRAME_BITS) * PAGE_BYTES, Self::OWN, bytes.len(), 0)?;
        self.run(Self::OWN, to, bytes.len(), Self::TO_MEMORY)
    }

    fn run(&self, from: u64, to: u64, bytes: usize, way: u64) -> anyhow::Result<()> {
        for (register, value) in [
            (Self::FROM, from),
            (Self::TO, to),
            (Self::BYTES, bytes as u64),
            (Self::COMMAND, Self::RUN | way),
        ] {
            self.registers.set(register, value).context("no such register")?;
        }
        let begun = Instant::now();
        while self.registers.get(Self::COMMAND).context("no such register")? & Self::RUN != 0 {
            anyhow::ensure!(begun.elapsed() < Self::LIMIT, "the device edu does not copy");
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}
