//! eBPF: the instructions that our small programs need, their tables, and the system call that loads them.

mod map;

use std::io;
use std::mem;
use std::os::fd::{FromRawFd, OwnedFd};

pub(crate) use self::map::{Array, Map, Mapped};

/// A helper by number (bpf-helpers(7)): an element of a map, or zero.
pub(crate) const MAP_LOOKUP_ELEM: i32 = 1;
/// Likewise: the time since the machine was started, as of its last tick (Linux 5.11).
pub(crate) const KTIME_GET_COARSE_NS: i32 = 160;
const BPF_PROG_LOAD: libc::c_int = 5;
/// The longest name of a program, in bytes.
const NAME_LEN_MAX: usize = 15;

/// One instruction as the kernel takes it (`struct bpf_insn`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instruction {
    code: u8,
    /// Destination in the low half, source in the high one.
    registers: u8,
    offset: i16,
    value: i32,
}

impl Instruction {
    /// Whether it is of a class of jumps (BPF_JMP, BPF_JMP32).
    const fn is_jump(self) -> bool {
        matches!(self.code & 7, 5 | 6)
    }
}

const fn instruction(code: u8, to: u8, from: u8, offset: i16, value: i32) -> Instruction {
    Instruction { code, registers: from << 4 | to, offset, value }
}

pub(crate) const EXIT: Instruction = instruction(0x95, 0, 0, 0, 0);
/// The upper 32 bits of a 64-bit load.
pub(crate) const SECOND_HALF: Instruction = instruction(0, 0, 0, 0, 0);

pub(crate) const fn move_value(to: u8, value: i32) -> Instruction {
    instruction(0xb7, to, 0, 0, value)
}

pub(crate) const fn move_register(to: u8, from: u8) -> Instruction {
    instruction(0xbf, to, from, 0, 0)
}

pub(crate) const fn add_value(to: u8, value: i32) -> Instruction {
    instruction(0x07, to, 0, 0, value)
}

pub(crate) const fn add_register(to: u8, from: u8) -> Instruction {
    instruction(0x0f, to, from, 0, 0)
}

/// Of 64 bits, as all that does not end in 32.
pub(crate) const fn subtract_register(to: u8, from: u8) -> Instruction {
    instruction(0x1f, to, from, 0, 0)
}

pub(crate) const fn and_value(to: u8, value: i32) -> Instruction {
    instruction(0x57, to, 0, 0, value)
}

/// As numbers without a sign.
pub(crate) const fn divide(to: u8, value: i32) -> Instruction {
    instruction(0x37, to, 0, 0, value)
}

pub(crate) const fn shift_left(to: u8, bits: i32) -> Instruction {
    instruction(0x67, to, 0, 0, bits)
}

pub(crate) const fn shift_right(to: u8, bits: u32) -> Instruction {
    instruction(0x77, to, 0, 0, bits.cast_signed())
}

pub(crate) const fn multiply(to: u8, value: i32) -> Instruction {
    instruction(0x27, to, 0, 0, value)
}

/// Of the lower 32 bits; the upper ones become zero, as with all that end in 32.
pub(crate) const fn multiply_32(to: u8, value: u32) -> Instruction {
    instruction(0x24, to, 0, 0, value.cast_signed())
}

pub(crate) const fn shift_right_32(to: u8, bits: u32) -> Instruction {
    instruction(0x74, to, 0, 0, bits.cast_signed())
}

/// Eight bytes of zero to where a register points.
pub(crate) const fn store_zero(to: u8, offset: i16) -> Instruction {
    instruction(0x7a, to, 0, offset, 0)
}

/// Eight bytes of a register to where another points.
pub(crate) const fn store_long(to: u8, offset: i16, from: u8) -> Instruction {
    instruction(0x7b, to, from, offset, 0)
}

/// The lower four bytes of a register to where another points.
pub(crate) const fn store_word(to: u8, offset: i16, from: u8) -> Instruction {
    instruction(0x63, to, from, offset, 0)
}

/// Eight bytes from where a register points.
pub(crate) const fn fetch_long(to: u8, from: u8, offset: i16) -> Instruction {
    instruction(0x79, to, from, offset, 0)
}

/// Four bytes from where a register points; the upper ones become zero.
pub(crate) const fn fetch_word(to: u8, from: u8, offset: i16) -> Instruction {
    instruction(0x61, to, from, offset, 0)
}

/// Two bytes, likewise.
pub(crate) const fn fetch_half(to: u8, from: u8, offset: i16) -> Instruction {
    instruction(0x69, to, from, offset, 0)
}

/// One byte, likewise.
pub(crate) const fn fetch_byte(to: u8, from: u8, offset: i16) -> Instruction {
    instruction(0x71, to, from, offset, 0)
}

/// The lower two bytes of a register to where another points.
pub(crate) const fn store_half(to: u8, offset: i16, from: u8) -> Instruction {
    instruction(0x6b, to, from, offset, 0)
}

pub(crate) const fn call(helper: i32) -> Instruction {
    instruction(0x85, 0, 0, 0, helper)
}

pub(crate) const fn jump(over: i16) -> Instruction {
    instruction(0x05, 0, 0, over, 0)
}

pub(crate) const fn jump_if(register: u8, value: i32, over: i16) -> Instruction {
    instruction(0x15, register, 0, over, value)
}

pub(crate) const fn jump_unless(register: u8, value: i32, over: i16) -> Instruction {
    instruction(0x55, register, 0, over, value)
}

/// If both registers are the same.
pub(crate) const fn jump_if_same(register: u8, other: u8, over: i16) -> Instruction {
    instruction(0x1d, register, other, over, 0)
}

pub(crate) const fn jump_unless_same(register: u8, other: u8, over: i16) -> Instruction {
    instruction(0x5d, register, other, over, 0)
}

/// If the first register is above the second, as numbers without a sign.
pub(crate) const fn jump_if_above(register: u8, other: u8, over: i16) -> Instruction {
    instruction(0x2d, register, other, over, 0)
}

/// As numbers without a sign.
pub(crate) const fn jump_if_least(register: u8, value: i32, over: i16) -> Instruction {
    instruction(0x35, register, 0, over, value)
}

/// If the first register is not below the second, as numbers without a sign.
pub(crate) const fn jump_unless_below(register: u8, other: u8, over: i16) -> Instruction {
    instruction(0x3d, register, other, over, 0)
}

/// As numbers with a sign.
pub(crate) const fn jump_if_least_signed(register: u8, value: i32, over: i16) -> Instruction {
    instruction(0x75, register, 0, over, value)
}

pub(crate) const fn jump_unless_zero(register: u8, over: i16) -> Instruction {
    jump_unless(register, 0, over)
}

/// A map by descriptor (source 1: BPF_PSEUDO_MAP_FD); [`SECOND_HALF`] follows.
pub(crate) const fn load_map(to: u8, map: libc::c_int) -> Instruction {
    instruction(0x18, to, 1, 0, map)
}

/// A number of 64 bits.
pub(crate) const fn load_long(to: u8, value: u64) -> [Instruction; 2] {
    let (low, high) = (value as u32, (value >> 32) as u32);
    [instruction(0x18, to, 0, 0, low.cast_signed()), instruction(0, 0, 0, 0, high.cast_signed())]
}

/// How far a jump goes over these.
pub(crate) const fn over(instructions: &[Instruction]) -> i16 {
    instructions.len() as i16
}

/// The length of a jump that [`landed`] is to set.
pub(crate) const TO_END: i16 = i16::MAX;

/// Makes the jumps with [`TO_END`] lead behind the last instruction.
pub(crate) fn landed(mut program: Vec<Instruction>) -> Vec<Instruction> {
    let len = program.len();
    for (at, instruction) in program.iter_mut().enumerate() {
        if instruction.is_jump() && instruction.offset == TO_END {
            instruction.offset = (len - at - 1) as i16;
        }
    }
    program
}

/// The size of a load from a packet into register 0, as a number in the host's order. Register 6 holds the
/// packet, and registers 1 to 5 are lost. A load beyond the packet's end ends the program with 0.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(crate) enum Width {
    Word = 0x00,
    Half = 0x08,
    Byte = 0x10,
}

/// From a place in the packet.
pub(crate) const fn load_packet(width: Width, at: i32) -> Instruction {
    instruction(0x20 | width as u8, 0, 0, 0, at)
}

/// Loads from `at` bytes behind the address in a register.
pub(crate) const fn load_behind(width: Width, register: u8, at: i32) -> Instruction {
    instruction(0x40 | width as u8, 0, register, 0, at)
}

/// `union bpf_attr` of BPF_PROG_LOAD.
#[repr(C)]
#[derive(Default)]
struct ProgramLoad {
    kind: u32,
    instructions_len: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; NAME_LEN_MAX + 1],
}

/// Gives the kernel a program of this kind (`BPF_PROG_TYPE_…`), under a name for lists of programs, which is
/// cut at [`NAME_LEN_MAX`].
///
/// # Errors
/// The kernel has no eBPF, grants no right to use it, or does not accept the program.
pub(crate) fn load_program(kind: u32, name: &[u8], program: &[Instruction]) -> io::Result<OwnedFd> {
    let mut attributes = ProgramLoad {
        kind,
        instructions_len: program.len() as u32,
        instructions: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        ..ProgramLoad::default()
    };
    attributes.name.iter_mut().take(NAME_LEN_MAX).zip(name).for_each(|(to, from)| *to = *from);
    // SAFETY: the kernel reads `instructions_len` instructions and a string that ends in zero. The pointers lead
    // to `program` and to a constant, which outlive the call.
    unsafe { descriptor(BPF_PROG_LOAD, &attributes) }
}

/// A command that returns a new descriptor.
///
/// # Safety
/// As [`bpf`], and the command must return a new descriptor, which nothing else knows
/// (BPF_MAP_CREATE, BPF_PROG_LOAD, BPF_LINK_CREATE).
pub(crate) unsafe fn descriptor<A>(command: libc::c_int, attributes: &A) -> io::Result<OwnedFd> {
    // SAFETY: the caller's.
    let raw = unsafe { bpf(command, attributes)? };
    // SAFETY: the command returned a new descriptor, as the caller has it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// The system call; returns its result.
///
/// # Safety
/// `attributes` is a `repr(C)` struct without padding: the first fields of `union bpf_attr` for the command. The
/// targets of its pointers live for as long as the kernel reads or writes them.
pub(crate) unsafe fn bpf<A>(command: libc::c_int, attributes: &A) -> io::Result<libc::c_int> {
    // SAFETY: the kernel reads as many bytes of `attributes` as it is told, which are those of the struct;
    // its pointers are the caller's affair.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            mem::size_of::<A>() as libc::c_uint,
        )
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc as libc::c_int) }
}
