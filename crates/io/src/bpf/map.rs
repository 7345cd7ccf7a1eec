//! Tables that eBPF programs read and write, and we too.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use super::{bpf, descriptor};

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_DELETE_ELEM: libc::c_int = 3;
const BPF_MAP_TYPE_HASH: u32 = 1;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_F_MMAPABLE: u32 = 1 << 10;

/// A map of keys of `K` bytes and values of `V`. It ends with its owner and with the last program that
/// reads it.
#[derive(Debug)]
pub(crate) struct Map<const K: usize, const V: usize> {
    fd: OwnedFd,
}

/// One of so many elements that are always there, all zero at first, by their numbers in the host's order.
pub(crate) type Array<const V: usize> = Map<{ mem::size_of::<u32>() }, V>;

impl<const V: usize> Array<V> {
    /// With elements 0 to `len` - 1.
    ///
    /// # Errors
    /// A kernel without eBPF, or without the right to use it.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        Self::create(BPF_MAP_TYPE_ARRAY, len, 0)
    }
}

impl<const K: usize, const V: usize> Map<K, V> {
    /// An empty one that takes memory for what is in it, which is at most so much.
    ///
    /// # Errors
    /// As [`Array::new`].
    pub(crate) fn hash(entries_max: usize) -> io::Result<Self> {
        Self::create(BPF_MAP_TYPE_HASH, entries_max, BPF_F_NO_PREALLOC)
    }

    fn create(map_type: u32, entries_max: usize, map_flags: u32) -> io::Result<Self> {
        let attributes = MapCreate {
            map_type,
            key_size: K as u32,
            value_size: V as u32,
            max_entries: entries_max as u32,
            map_flags,
        };
        // SAFETY: the fields of the command, without a pointer; it returns a new descriptor.
        let fd = unsafe { descriptor(BPF_MAP_CREATE, &attributes) }?;
        Ok(Self { fd })
    }

    /// What a program names it by, as long as it is there.
    pub(crate) fn number(&self) -> libc::c_int {
        self.fd.as_raw_fd()
    }

    /// Sets what stands under a key.
    ///
    /// # Errors
    /// E2BIG: the map is full, or has no such element; else the kernel has no memory for it.
    pub(crate) fn set(&self, key: [u8; K], value: [u8; V]) -> io::Result<()> {
        let mut value = value;
        self.element(BPF_MAP_UPDATE_ELEM, key, Some(&mut value))
    }

    /// What stands under a key.
    ///
    /// # Errors
    /// ENOENT: nothing.
    pub(crate) fn get(&self, key: [u8; K]) -> io::Result<[u8; V]> {
        let mut value = [0; V];
        self.element(BPF_MAP_LOOKUP_ELEM, key, Some(&mut value))?;
        Ok(value)
    }

    /// Removes a key.
    ///
    /// # Errors
    /// ENOENT: it is not there. EINVAL: an array's elements stay.
    pub(crate) fn remove(&self, key: [u8; K]) -> io::Result<()> {
        self.element(BPF_MAP_DELETE_ELEM, key, None)
    }

    fn element(
        &self,
        command: libc::c_int,
        key: [u8; K],
        value: Option<&mut [u8; V]>,
    ) -> io::Result<()> {
        let attributes = MapElement {
            map: self.number() as u32,
            unused: 0,
            key: (&raw const key) as u64,
            value: value.map_or(0, |value| std::ptr::from_mut(value) as u64),
            flags: 0,
        };
        // SAFETY: the fields of these commands; key and value are as long as the map was made for, and
        // there for the call. The value alone is written to, by a pointer made for that.
        unsafe { bpf(command, &attributes) }.map(|_| ())
    }
}

/// An array's one element of `V` bytes, which this process has in its memory: it is written to without a call.
#[derive(Debug)]
pub(crate) struct Mapped<const V: usize> {
    array: Array<V>,
    words: NonNull<AtomicU64>,
}

// SAFETY: a pointer to memory that is this value's until it is dropped, and there for all threads.
unsafe impl<const V: usize> Send for Mapped<V> {}
// SAFETY: only atomics are reached by it.
unsafe impl<const V: usize> Sync for Mapped<V> {}

impl<const V: usize> Mapped<V> {
    const WORDS: usize = V / mem::size_of::<u64>();

    /// All zero.
    ///
    /// # Errors
    /// As [`Array::new`] (Linux 5.5).
    pub(crate) fn new() -> io::Result<Self> {
        let array = Array::create(BPF_MAP_TYPE_ARRAY, 1, BPF_F_MMAPABLE)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: new memory, wherever the kernel likes, of an array that is large enough: the kernel gives
        // whole pages.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), V, access, libc::MAP_SHARED, array.number(), 0)
        };
        match NonNull::new(at.cast()) {
            Some(words) if at != libc::MAP_FAILED => Ok(Self { array, words }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// What a program names its array by.
    pub(crate) fn number(&self) -> libc::c_int {
        self.array.number()
    }

    /// Eight bytes each.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: so many are mapped for as long as this is there, aligned to a page and zero at first; others
        // write to them whole.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), Self::WORDS) }
    }
}

impl<const V: usize> Drop for Mapped<V> {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nothing can reach it any more.
        unsafe { libc::munmap(self.words.as_ptr().cast(), V) };
    }
}

/// `union bpf_attr` of BPF_MAP_CREATE, up to the last field set here.
#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

/// That of the commands on an element.
#[repr(C)]
struct MapElement {
    map: u32,
    unused: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Option<i32> {
        result.unwrap_err().raw_os_error()
    }

    #[test]
    fn what_was_set_is_there_until_it_is_removed() {
        let map = Map::<8, 1>::hash(2).unwrap();
        let [one, two, three] = [1, 2, 3].map(|number: u64| number.to_ne_bytes());
        assert_eq!(errno(map.get(one)), Some(libc::ENOENT));
        for (key, value) in [(one, 5), (two, 6), (one, 7)] {
            map.set(key, [value]).unwrap();
        }
        assert_eq!((map.get(one).unwrap(), map.get(two).unwrap()), ([7], [6]));
        assert_eq!(errno(map.set(three, [8])), Some(libc::E2BIG));
        map.remove(one).unwrap();
        assert_eq!(errno(map.remove(one)), Some(libc::ENOENT));
        map.set(three, [8]).unwrap();
    }

    #[test]
    fn an_array_has_all_its_elements_at_once_and_no_other() {
        let array = Array::<16>::new(3).unwrap();
        let key = |number: u32| number.to_ne_bytes();
        assert_eq!(array.get(key(2)).unwrap(), [0; 16]);
        array.set(key(2), [9; 16]).unwrap();
        assert_eq!((array.get(key(2)).unwrap(), array.get(key(1)).unwrap()), ([9; 16], [0; 16]));
        assert_eq!(errno(array.set(key(3), [9; 16])), Some(libc::E2BIG));
        assert_eq!(errno(array.get(key(3))), Some(libc::ENOENT));
        assert_eq!(errno(array.remove(key(2))), Some(libc::EINVAL));
    }

    #[test]
    fn what_is_written_to_the_memory_of_an_array_is_in_it() {
        let mapped = Mapped::<2_048>::new().unwrap();
        assert_eq!(mapped.words().len(), 256);
        for (word, number) in mapped.words().iter().zip(1..) {
            assert_eq!(word.load(Relaxed), 0);
            word.store(number, Relaxed);
        }
        let value = mapped.array.get(0_u32.to_ne_bytes()).unwrap();
        let words = value.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
        assert!(words.eq(1..=256));
        mapped.array.set(0_u32.to_ne_bytes(), [1; 2_048]).unwrap();
        assert!(mapped.words().iter().all(|word| word.load(Relaxed) == 0x0101_0101_0101_0101));
        let number = mapped.number();
        drop(mapped);
        assert!(!std::path::Path::new(&format!("/proc/self/fd/{number}")).exists());
    }
}
