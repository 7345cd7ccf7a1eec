//! A hash table for the data path: 64-bit keys, open addressing, one multiplication to hash.

/// The smallest number of slots, as a power of two.
const SLOT_BITS_MIN: u32 = 6;
/// Multiplier of the hash (2^64 divided by the golden ratio, as Fibonacci hashing has it).
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Maps keys to values; the caller bounds how many. Look-ups do not allocate; insertions may.
///
/// Keys come from authenticated peers (Ethernet addresses) or from this host (SPIs, networks), so that an
/// outsider cannot choose them to collide.
#[derive(Clone, Debug)]
pub(crate) struct Table<V> {
    /// Their number is a power of two.
    slots: Vec<Option<(u64, V)>>,
    /// The hash is as many bits as the number of slots has, from the top of the product: all bits of a key count
    /// there.
    shift: u32,
    len: usize,
}

impl<V: Copy> Table<V> {
    pub(crate) fn new() -> Self {
        Self { slots: vec![None; 1 << SLOT_BITS_MIN], shift: u64::BITS - SLOT_BITS_MIN, len: 0 }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn get(&self, key: u64) -> Option<V> {
        let mut slot = self.home(key);
        loop {
            match self.slots[slot] {
                Some((found, value)) if found == key => return Some(value),
                Some(_) => slot = self.next(slot),
                None => return None,
            }
        }
    }

    /// Sets the value of a key; returns the old one.
    pub(crate) fn insert(&mut self, key: u64, value: V) -> Option<V> {
        if (self.len + 1) * 2 > self.slots.len() {
            self.grow();
        }
        let mut slot = self.home(key);
        loop {
            match &mut self.slots[slot] {
                Some((found, old)) if *found == key => {
                    return Some(std::mem::replace(old, value));
                }
                Some(_) => slot = self.next(slot),
                empty => {
                    *empty = Some((key, value));
                    self.len += 1;
                    return None;
                }
            }
        }
    }

    /// Forgets a key; returns its value.
    pub(crate) fn remove(&mut self, key: u64) -> Option<V> {
        let mut slot = self.home(key);
        let value = loop {
            match self.slots[slot] {
                Some((found, value)) if found == key => break value,
                Some(_) => slot = self.next(slot),
                None => return None,
            }
        };
        self.slots[slot] = None;
        self.len -= 1;
        self.close_gap(slot);
        Some(value)
    }

    /// Keeps the entries that `keep` is true for.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(u64, V) -> bool) {
        let gone: Vec<u64> =
            self.slots.iter().flatten().filter(|(k, v)| !keep(*k, *v)).map(|(k, _)| *k).collect();
        for key in gone {
            self.remove(key);
        }
    }

    /// Moves back entries that a look-up would no longer find across the gap (Knuth's algorithm R).
    fn close_gap(&mut self, mut gap: usize) {
        let mask = self.slots.len() - 1;
        let mut slot = self.next(gap);
        while let Some((key, _)) = self.slots[slot] {
            let distance_home = slot.wrapping_sub(self.home(key)) & mask;
            let distance_gap = slot.wrapping_sub(gap) & mask;
            if distance_home >= distance_gap {
                self.slots.swap(slot, gap);
                gap = slot;
            }
            slot = self.next(slot);
        }
    }

    #[inline]
    fn home(&self, key: u64) -> usize {
        (key.wrapping_mul(ODD) >> self.shift) as usize
    }

    #[inline]
    fn next(&self, slot: usize) -> usize {
        (slot + 1) & (self.slots.len() - 1)
    }

    fn grow(&mut self) {
        let larger = vec![None; self.slots.len() * 2];
        let old = std::mem::replace(&mut self.slots, larger);
        self.shift -= 1;
        self.len = 0;
        for (key, value) in old.into_iter().flatten() {
            self.insert(key, value);
        }
    }
}

/// Values under small numbers that are used again when freed.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Option<T>>,
    /// The numbers that were freed.
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    /// The number that the next value gets.
    pub(crate) fn next(&self) -> u32 {
        self.free.last().copied().unwrap_or(self.slots.len() as u32)
    }

    pub(crate) fn insert(&mut self, value: T) -> u32 {
        if let Some(free) = self.free.pop() {
            self.slots[free as usize] = Some(value);
            return free;
        }
        self.slots.push(Some(value));
        (self.slots.len() - 1) as u32
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<T> {
        let value = self.slots.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(value)
    }

    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        self.slots.get(index as usize)?.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize)?.as_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(index, slot)| Some((index as u32, slot.as_ref()?)))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        self.slots
            .iter_mut()
            .enumerate()
            .filter_map(|(index, slot)| Some((index as u32, slot.as_mut()?)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_as_a_hash_map(steps in prop::collection::vec((0_u64..90, 0_u8..3, any::<u32>()), 0..600)) {
            let mut table = Table::new();
            let mut model = HashMap::new();
            for (key, step, value) in steps {
                // Keys that differ in their upper bits, and keys that do in their lower ones.
                let key = if key % 2 == 0 { key << 40 } else { key };
                match step {
                    0 => prop_assert_eq!(table.insert(key, value), model.insert(key, value)),
                    1 => prop_assert_eq!(table.remove(key), model.remove(&key)),
                    _ => prop_assert_eq!(table.get(key), model.get(&key).copied()),
                }
                prop_assert_eq!(table.len(), model.len());
            }
            table.retain(|key, _| key % 3 == 0);
            model.retain(|key, _| key % 3 == 0);
            for key in (0..90).flat_map(|key| [key, key << 40]) {
                prop_assert_eq!(table.get(key), model.get(&key).copied());
            }
        }
    }

    /// The number of slots that a look-up of a key reads.
    fn reads(table: &Table<u32>, key: u64) -> usize {
        let home = table.home(key);
        (home..)
            .position(|slot| {
                let found = table.slots[slot & (table.slots.len() - 1)];
                found.is_none_or(|(found, _)| found == key)
            })
            .unwrap()
            + 1
    }

    /// The upper 16 bits count as much as the others: networks that hold the same addresses do not crowd each other.
    #[test]
    fn equal_addresses_of_many_networks_are_found_at_once() {
        for (networks, addresses) in [(2, 1_000), (256, 4), (256, 1_000), (1, 100_000)] {
            let keys = || {
                (0..networks).flat_map(|network| {
                    (0..addresses)
                        .map(move |address| (network << 48) | (0x0242_0a20_0000 + address))
                })
            };
            let mut table = Table::new();
            keys().for_each(|key| _ = table.insert(key, 7));
            let all: usize = keys().map(|key| reads(&table, key)).sum();
            let mean = all as f64 / (networks * addresses) as f64;
            assert!(mean < 2.0, "{mean} slots for {addresses} addresses in {networks} networks");
        }
    }

    #[test]
    fn a_slab_uses_freed_numbers_again() {
        let mut slab = Slab::new();
        assert_eq!((slab.insert('a'), slab.insert('b')), (0, 1));
        assert_eq!(slab.next(), 2);
        assert_eq!((slab.remove(0), slab.remove(0), slab.remove(9)), (Some('a'), None, None));
        assert_eq!(slab.next(), 0);
        assert_eq!(slab.insert('c'), 0);
        assert_eq!(slab.iter().collect::<Vec<_>>(), [(0, &'c'), (1, &'b')]);
        assert_eq!((slab.get(1), slab.get(2)), (Some(&'b'), None));
    }
}
