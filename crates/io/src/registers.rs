//! Registers of a device, which are memory to a program: the laboratory's, of a device that QEMU has for tests.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;

const REGISTER_BYTES: usize = size_of::<u64>();

/// A device's registers of eight bytes, by their offset in a file that stands for them. An example is `resource0`
/// of a PCI device under `/sys`.
#[derive(Debug)]
pub struct Registers {
    first: NonNull<u64>,
    bytes: usize,
}

impl Registers {
    /// The registers in the first `bytes` bytes.
    ///
    /// # Errors
    /// The file cannot be opened for reading and writing, is shorter, or is none that can be mapped.
    pub fn open(path: &Path, bytes: usize) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() < bytes as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (access, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: new memory, wherever the kernel likes, of a file that is long enough.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, fd, 0) };
        match NonNull::new(at.cast()) {
            Some(first) if at != libc::MAP_FAILED => Ok(Self { first, bytes }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Reads the register that begins there; `None`: there is none.
    #[must_use]
    pub fn get(&self, at: usize) -> Option<u64> {
        // SAFETY: aligned, and within what is mapped for as long as this is there; read once, as a device's
        // register may have to be.
        self.register(at).map(|register| unsafe { register.read_volatile() })
    }

    /// Writes to the register that begins there; `None`: there is none.
    #[must_use]
    pub fn set(&self, at: usize, value: u64) -> Option<()> {
        // SAFETY: as `get`; nothing has a reference to it.
        self.register(at).map(|register| unsafe { register.write_volatile(value) })
    }

    fn register(&self, at: usize) -> Option<NonNull<u64>> {
        let is_there =
            at.is_multiple_of(REGISTER_BYTES) && at < self.bytes - self.bytes % REGISTER_BYTES;
        // SAFETY: within what is mapped.
        is_there.then(|| unsafe { self.first.byte_add(at) })
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`, and nothing can reach it any more.
        unsafe { libc::munmap(self.first.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn registers_are_in_the_file_and_nothing_is_beyond_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [1; 20]).unwrap();
        let registers = Registers::open(file.path(), 20).unwrap();
        assert_eq!(registers.get(8), Some(0x0101_0101_0101_0101));
        assert_eq!(registers.set(8, 0x0203), Some(()));
        assert_eq!(std::fs::read(file.path()).unwrap()[8..17], [3, 2, 0, 0, 0, 0, 0, 0, 1]);
        for at in [4, 16, 24, usize::MAX - 7] {
            assert_eq!((registers.get(at), registers.set(at, 5)), (None, None), "{at}");
        }
        drop(registers);
        assert!(Registers::open(file.path(), 21).is_err());
        assert!(Registers::open(Path::new("/"), 8).is_err());
    }
}
