//! Tables that eBPF programs read and write, and we too.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use super::{bpf, descriptor};

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_DELETE_ELEM: libc::c_int = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_int = 4;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_MAP_TYPE_HASH: u32 = 1;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_F_MMAPABLE: u32 = 1 << 10;

/// Keys that [`Map::clear`] removes at most.
const CLEARED_MAX: usize = 1 << 20;

/// A map's name, which ends in zero.
pub(crate) type MapName = [u8; 16];

/// A map of keys of `K` bytes and values of `V`. It ends with its owner and with the last program that
/// reads it.
#[derive(Debug)]
pub(crate) struct Map<const K: usize, const V: usize> {
    fd: OwnedFd,
}

/// A map whose elements are always there, all zero at first, by their numbers in the host's order.
pub(crate) type Array<const V: usize> = Map<{ mem::size_of::<u32>() }, V>;

impl<const V: usize> Array<V> {
    /// With elements 0 to `len` - 1.
    ///
    /// # Errors
    /// A kernel without eBPF, or without the right to use it.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        Self::create(BPF_MAP_TYPE_ARRAY, len, 0, MapName::default())
    }
}

impl<const K: usize, const V: usize> Map<K, V> {
    /// Makes an empty map that takes memory for its entries, at most `entries_max`. The name
    /// shows in lists of maps, and another process takes the map over by it.
    ///
    /// # Errors
    /// As [`Array::new`].
    pub(crate) fn hash(entries_max: usize, name: MapName) -> io::Result<Self> {
        Self::create(BPF_MAP_TYPE_HASH, entries_max, BPF_F_NO_PREALLOC, name)
    }

    /// Takes over a map that another process has made by [`Self::hash`] and kept.
    ///
    /// # Errors
    /// It is not a map of this name and kind.
    pub(crate) fn adopt(fd: OwnedFd, entries_max: usize, name: MapName) -> io::Result<Self> {
        match Self::is_like(fd.as_fd(), entries_max, name)? {
            true => Ok(Self { fd }),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Whether a descriptor is of a map that [`Self::hash`] has made with these.
    ///
    /// # Errors
    /// It is of no eBPF object.
    pub(crate) fn is_like(
        fd: BorrowedFd<'_>,
        entries_max: usize,
        name: MapName,
    ) -> io::Result<bool> {
        let mut info = MapInfo::default();
        let attributes = GetInfo {
            object: fd.as_raw_fd() as u32,
            len: mem::size_of::<MapInfo>() as u32,
            info: (&raw mut info) as u64,
        };
        // SAFETY: the fields of the command; the kernel writes at most `len` bytes to `info`, which lives over the
        // call.
        unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &attributes) }?;
        let wanted = MapInfo {
            map_type: BPF_MAP_TYPE_HASH,
            key_size: K as u32,
            value_size: V as u32,
            max_entries: entries_max as u32,
            name,
            id: info.id,
            map_flags: info.map_flags,
        };
        Ok(info == wanted)
    }

    /// Removes all keys.
    ///
    /// # Errors
    /// EINVAL: an array's elements stay.
    pub(crate) fn clear(&self) -> io::Result<()> {
        // Others add none meanwhile; if they did, a bound ends it.
        let mut next = [0; K];
        for _ in 0..=CLEARED_MAX {
            let attributes = MapElement {
                map: self.number() as u32,
                unused: 0,
                key: 0,
                value: (&raw mut next) as u64,
                flags: 0,
            };
            // SAFETY: the fields of the command. The kernel writes a key of the map's key length to `next`, which
            // outlives the call.
            match unsafe { bpf(BPF_MAP_GET_NEXT_KEY, &attributes) } {
                Ok(_) => self.remove(next)?,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// The map's descriptor.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn create(
        map_type: u32,
        entries_max: usize,
        map_flags: u32,
        name: MapName,
    ) -> io::Result<Self> {
        let attributes = MapCreate {
            map_type,
            key_size: K as u32,
            value_size: V as u32,
            max_entries: entries_max as u32,
            map_flags,
            inner_map: 0,
            numa_node: 0,
            name,
        };
        // SAFETY: the fields of the command, without a pointer; it returns a new descriptor.
        let fd = unsafe { descriptor(BPF_MAP_CREATE, &attributes) }?;
        Ok(Self { fd })
    }

    /// The number by which a program names the map, as long as the map is open.
    pub(crate) fn number(&self) -> libc::c_int {
        self.fd.as_raw_fd()
    }

    /// Sets the value of a key.
    ///
    /// # Errors
    /// E2BIG: the map is full, or has no such element; else the kernel has no memory for it.
    pub(crate) fn set(&self, key: [u8; K], value: [u8; V]) -> io::Result<()> {
        let mut value = value;
        self.element(BPF_MAP_UPDATE_ELEM, key, Some(&mut value))
    }

    /// Returns the value of a key.
    ///
    /// # Errors
    /// ENOENT: the map does not have the key.
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
        let array = Array::create(BPF_MAP_TYPE_ARRAY, 1, BPF_F_MMAPABLE, MapName::default())?;
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

    /// The number by which a program names its array.
    pub(crate) fn number(&self) -> libc::c_int {
        self.array.number()
    }

    /// Eight bytes each.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: `WORDS` words are mapped for as long as this is there, aligned to a page and zero at first; others
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
    inner_map: u32,
    numa_node: u32,
    name: MapName,
}

/// `struct bpf_map_info`, up to the last field read here.
#[repr(C)]
#[derive(Debug, Default, PartialEq, Eq)]
struct MapInfo {
    map_type: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    name: MapName,
}

/// That of BPF_OBJ_GET_INFO_BY_FD.
#[repr(C)]
struct GetInfo {
    object: u32,
    len: u32,
    info: u64,
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
    fn an_entry_is_there_until_it_is_removed() {
        let map = Map::<8, 1>::hash(2, *b"weft_test\0\0\0\0\0\0\0").unwrap();
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
    fn a_map_that_was_kept_is_taken_over_with_what_is_in_it() {
        const NAME: MapName = *b"weft_test\0\0\0\0\0\0\0";
        let map = Map::<8, 1>::hash(5, NAME).unwrap();
        for number in 1..=5_u64 {
            map.set(number.to_ne_bytes(), [3]).unwrap();
        }
        let kept = || map.as_fd().try_clone_to_owned().unwrap();
        let taken = Map::<8, 1>::adopt(kept(), 5, NAME).unwrap();
        assert_eq!(taken.get(2_u64.to_ne_bytes()).unwrap(), [3]);
        taken.clear().unwrap();
        assert!((1..=5_u64).all(|number| map.get(number.to_ne_bytes()).is_err()));
        taken.clear().unwrap();
        assert!(Map::<8, 2>::adopt(kept(), 5, NAME).is_err());
        assert!(Map::<8, 1>::adopt(kept(), 6, NAME).is_err());
        assert!(Map::<8, 1>::adopt(kept(), 5, MapName::default()).is_err());
        let other = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(Map::<8, 1>::adopt(other.into(), 5, NAME).is_err());
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
    fn writes_to_the_mapped_memory_of_an_array_are_in_it() {
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
        // Another test may get the number of the closed descriptor at once, but not the map.
        let path = format!("/proc/self/fdinfo/{}", mapped.number());
        let id_of =
            |info: &str| info.lines().find(|it| it.starts_with("map_id:")).map(str::to_owned);
        let id = id_of(&std::fs::read_to_string(&path).unwrap());
        assert!(id.is_some());
        drop(mapped);
        assert_ne!(id_of(&std::fs::read_to_string(&path).unwrap_or_default()), id);
    }
}
